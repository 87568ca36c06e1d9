"""What a drafter is: two methods that all have, and two that some have besides.

propose -> (a step is planned) -> complete -> (it is launched) -> follow -> (its results are there) -> observe
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.step_plan import StepPlan
from quantkit.runtime.core.step_result import Launched, Outcome


class Drafter(Protocol):
    """Where guesses come from."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Up to so many tokens that may follow; empty where there is no good guess. A `DeviceDrafter` gives
        `guess_in_row` instead of tokens that only the device will know."""

    def observe(self, launched: Launched, outcomes: list[Outcome], ended: Collection[int]) -> None:
        """The results of a step are there, and its tokens not yet known: how the guesses did of those who speculate and
        go on. `ended` are the ids of sequences that ended since the last call: nothing need be kept of them."""


class DeviceDrafter(Protocol):
    """One that guesses on the device, when the step is planned and pages are where they belong."""

    def complete(self, plan: StepPlan) -> StepPlan:
        """The plan, in which guesses that the host must know and the logits that they were drawn from are filled in
        (`StepPlan.with_guesses`). Drafts keep their lengths."""


class EarlyDrafter(Protocol):
    """One that guesses for the next step before the host knows what this one brought."""

    def follow(self, launched: Launched) -> None:
        """The step is on its way: guesses for the next one are queued behind it."""
