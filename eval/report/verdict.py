"""The verdict of a comparison: what the rules choose, and the two sentences that say it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quantkit.eval.advice.advice import Advice
from quantkit.eval.advice.from_rows import advise_by_rows
from quantkit.eval.compare.results import Comparison
from quantkit.eval.report.rules import Choice, choose
from quantkit.eval.report.sentences import two_sentences


@dataclass(frozen=True)
class Verdict(Choice):
    sentences: tuple[str, str]
    advice: tuple[Advice, ...]  # one for each goal that was measured

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(comparison: Comparison) -> Verdict:
    choice = choose(comparison)
    return Verdict(
        **vars(choice), sentences=two_sentences(comparison, choice), advice=advise_by_rows(comparison, choice)
    )
