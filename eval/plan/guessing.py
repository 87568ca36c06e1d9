"""What speculation would bring at an acceptance rate: arithmetic; `quantkit bench speculative` measures.

Of k guesses that are each right with probability a, a step brings 1 + a + ... + a**k tokens. It reads weights and cache
once as a plain step does, and computes k + 1 rows for every request. What a guess itself costs depends on who makes it:
nothing for n-grams, a step of the draft model else. So two figures: the speed-up with guesses for nothing, and what
one guess may cost before nothing is left.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from quantkit.errors import InputError
from quantkit.eval.plan.efficiency import Efficiency
from quantkit.eval.plan.roofline import Ceiling


@dataclass(frozen=True)
class Guessing:
    """How good guesses are."""

    acceptance: float
    guesses: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance < 1:
            raise InputError(f"--acceptance is {self.acceptance:g}, but must be 0 or more and less than 1")
        if not 1 <= self.guesses <= 32:
            raise InputError(f"--guesses is {self.guesses}, but must be 1 to 32")

    @property
    def tokens_per_step(self) -> float:
        return math.fsum(self.acceptance**right for right in range(self.guesses + 1))


@dataclass(frozen=True)
class Gain:
    """Of one batch. Seconds."""

    batch: int
    plain: float  # a step without guesses
    verifying: float  # a step with them
    speed_up: float  # where guesses cost nothing
    worth: float  # what one guess may cost, as a share of a plain step; 0 or less: nothing

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def gain(efficiency: Efficiency, ceiling: Ceiling, guessing: Guessing, batch: int, context: int) -> Gain:
    """Rows of guesses are requests that read no cache of their own."""
    rows = batch * (guessing.guesses + 1)
    plain = efficiency.step_seconds(ceiling, batch, context)
    verifying = efficiency.step_seconds(ceiling, batch, context, rows=rows)
    ratio = guessing.tokens_per_step * plain / verifying
    worth = (guessing.tokens_per_step - verifying / plain) / guessing.guesses
    return Gain(batch, plain, verifying, ratio, worth)
