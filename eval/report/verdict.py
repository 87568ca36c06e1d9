"""The verdict of a comparison: what the rules choose, and the two sentences that say it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quantkit.eval.compare.results import Comparison
from quantkit.eval.report.rules import Choice, choose
from quantkit.eval.report.sentences import two_sentences


@dataclass(frozen=True)
class Verdict(Choice):
    sentences: tuple[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(comparison: Comparison) -> Verdict:
    choice = choose(comparison)
    return Verdict(**vars(choice), sentences=two_sentences(comparison, choice))
