"""What guessing may lose: a small allowance at the start, and one percent of all decoding since.

Counted in plain steps of the sequences that run, so that it means the same for any model. A step with guesses that took
as long as 1.5 plain ones and brought 1.3 tokens for each sequence lost 0.2. What it gained comes back into the budget,
but only up to a few steps: good times long ago are no reason to lose now. Nor does it owe more than some: a step that
captured a graph takes as long as hundreds, but only once.
"""

from __future__ import annotations

_START = 1.5  # plain steps
_SHARE = 0.01  # of the time
MOST_SAVED = 4.0
_MOST_OWED = 16.0


class LossBudget:
    def __init__(self) -> None:
        self.left = _START

    def spend(self, lost: float) -> None:
        """Plain steps; less than nothing where guesses gained."""
        self.left = min(max(self.left - lost, -_MOST_OWED), MOST_SAVED)

    def passed(self, steps: float) -> None:
        """So much time went by, in plain steps."""
        self.left = min(self.left + _SHARE * steps, MOST_SAVED)
