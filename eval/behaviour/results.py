"""What was found about a model's behaviour, and all that is needed to find it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.eval.behaviour.answers import Asking
from quantkit.eval.behaviour.intervals import WORSE
from quantkit.eval.quality.bootstrap import Interval

INTERVALS = (
    "[ ]: 95 % confidence interval over prompts; shares by Wilson, differences paired, prompt by prompt, by Bonett and "
    "Price"
)


@dataclass(frozen=True)
class MeasureResult:
    """One measure. None: there was nothing to measure it on, or no base to compare with."""

    name: str
    label: str
    higher_is_better: bool
    prompts: int
    share: Interval | None
    base_share: Interval | None = None
    difference: Interval | None = None  # model - base
    verdict: str | None = None  # worse | no worse | cannot tell with N prompts
    not_measured: str | None = None  # why


@dataclass(frozen=True)
class SameAnswers:
    """How far two models say the same, token by token."""

    share: Interval
    first_difference: int | None  # the token from which on they differ, counted from 1; the median where they do


@dataclass(frozen=True)
class BehaviourResult:
    model: str
    base: str | None
    measures: tuple[MeasureResult, ...]
    same_answers: SameAnswers | None
    prompts: int  # that were asked
    chat_template: bool  # False: the model has none, and was asked in plain text
    asking: Asking
    arithmetic: str
    failures: tuple[str, ...]  # why the engine gave up on answers, which count as not ended
    answers: Sequence[dict[str, Any]]  # every question with what both models said

    @property
    def worse(self) -> list[str]:
        """The measures that a gate refuses."""
        return [one.label for one in self.measures if one.verdict == WORSE]

    @property
    def asked_as(self) -> str:
        return "through the chat template" if self.chat_template else "as plain text, for there is no chat template"

    @property
    def protocol(self) -> str:
        asking = self.asking
        how = (
            "greedy"
            if asking.temperature == 0
            else f"{asking.samples} answers each at temperature {asking.temperature}"
        )
        return (
            f"{self.prompts} prompts {self.asked_as}, {how}, at most {asking.max_tokens} tokens, "
            f"seed {asking.seed}; quantkit's engine, {self.arithmetic}"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"intervals": INTERVALS, "protocol": self.protocol}
