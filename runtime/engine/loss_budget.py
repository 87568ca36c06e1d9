"""What guessing may lose: a small allowance at the start, and one percent of all decoding since.

Counted in plain steps of the sequences that run, so that it means the same for any model. A step with guesses that took
as long as 1.5 plain ones and brought 1.3 tokens for each sequence lost 0.2. What it gained comes back into the budget,
but only up to a few steps: good times long ago are no reason to lose now. What time has saved may be more, as a look
at a long prompt is dear; a single look never spends much more than its price. Nor does the budget owe more than some
steps: one that captured a graph takes as long as hundreds, but only once.
"""

from __future__ import annotations

ALLOWANCE = 1.5  # plain steps: at the start, and of a look beside its price
MOST_GAINED = 4.0
_MOST_SAVED = 64.0
_MOST_OWED = 16.0
_SHARE = 0.01  # of the time


class LossBudget:
    def __init__(self) -> None:
        self.left = ALLOWANCE
        self._floor = 0.0  # below which the present look has spent its part

    @property
    def lasts(self) -> bool:
        return self.left > self._floor

    def begin_look(self, price: float) -> None:
        self._floor = max(0.0, self.left - price - ALLOWANCE)

    def spend(self, lost: float) -> None:
        """Plain steps; less than nothing where guesses gained."""
        self.left = max(min(self.left - lost, max(self.left, MOST_GAINED)), -_MOST_OWED)

    def passed(self, steps: float) -> None:
        """So much time went by, in plain steps."""
        self.left = min(self.left + _SHARE * steps, _MOST_SAVED)
