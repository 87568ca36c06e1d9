"""How sure a number is: a bootstrap over windows. Tokens of one window are not independent, windows nearly are.

Percentile intervals of few windows are too narrow. Their percentiles are therefore moved outwards by as much as
Student's t asks for (the "expanded percentile" interval), so that 8 windows are covered as well as 100.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

RESAMPLES = 1000
CONFIDENCE = 0.95
_CHUNK_VALUES = 1 << 24  # of a quantile's running counts at a time


@dataclass(frozen=True)
class Interval:
    """A measured value and its 95 % confidence interval; low and high are None where one window cannot tell."""

    value: float
    low: float | None = None
    high: float | None = None

    def scaled(self, transform: Callable[[float], float]) -> Interval:
        """Of an increasing function of the value."""
        low, high = (None if bound is None else transform(bound) for bound in (self.low, self.high))
        return Interval(transform(self.value), low, high)

    def text(self, digits: str) -> str:
        """`15.91 [15.20, 16.64]`, or `15.91` without an interval; `digits` is a format such as `.2f`."""
        if self.low is None or self.high is None:
            return f"{self.value:{digits}}"
        return f"{self.value:{digits}} [{self.low:{digits}}, {self.high:{digits}}]"

    def holds(self, value: float) -> bool:
        """Whether the interval reaches to the value; False without an interval."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high

    def overlaps(self, other: Interval) -> bool:
        """Whether two intervals share a value; without intervals, whether the values are equal."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return self.value == other.value
        return self.low <= other.high and other.low <= self.high

    @property
    def upper(self) -> float:
        """The far end of what is likely; the value itself where nothing is known about that."""
        return self.value if self.high is None else self.high

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Interval:
        return cls(given["value"], given["low"], given["high"])


@dataclass(frozen=True, eq=False)
class Resamples:
    """The same draws of windows for every number, so that numbers of one measurement belong together."""

    counts: Tensor  # float64 [resamples, windows]: how often each window was drawn

    @classmethod
    def draw(cls, windows: int, seed: int) -> Resamples:
        drawn = torch.randint(windows, (RESAMPLES, windows), generator=torch.Generator().manual_seed(seed))
        counts = torch.zeros(RESAMPLES, windows, dtype=torch.float64)
        return cls(counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64)))

    @property
    def windows(self) -> int:
        return self.counts.shape[1]

    def ratio(self, sums: Tensor, sizes: Tensor) -> Interval:
        """Of sum(sums) / sum(sizes), both float64 [windows]: a mean per token, per byte."""
        return self._interval(float(sums.sum() / sizes.sum()), (self.counts @ sums) / (self.counts @ sizes))

    def quantile(self, values: Tensor, level: float) -> Interval:
        """The smallest of the values [windows, tokens] that at least `level` of them do not exceed."""
        ordered, order = values.double().flatten().sort()
        owners = order // values.shape[1]
        everything = torch.ones(1, self.windows, dtype=torch.float64)
        found = float(_quantiles(everything, ordered, owners, level))
        rows = max(1, _CHUNK_VALUES // len(ordered))
        return self._interval(
            found, torch.cat([_quantiles(part, ordered, owners, level) for part in self.counts.split(rows)])
        )

    def _interval(self, value: float, resampled: Tensor) -> Interval:
        if self.windows < 2:
            return Interval(value)
        tail = _tail(self.windows)
        low, high = torch.quantile(resampled, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
        return Interval(value, low, high)


def paired_difference(ones: Sequence[float], others: Sequence[float], seed: int) -> Interval:
    """Of mean(ones) - mean(others), where both have one number for each of the same windows.

    Windows that are hard for one model are hard for the other, so their separate intervals are mostly the same luck
    twice. Each draw takes the same windows of both, and what they share cancels. Does it hold 0, they cannot be told
    apart; the same draws as for every other number of that seed.
    """
    differences = torch.tensor(ones, dtype=torch.float64) - torch.tensor(others, dtype=torch.float64)
    return Resamples.draw(len(differences), seed).ratio(differences, torch.ones_like(differences))


def _quantiles(counts: Tensor, ordered: Tensor, owners: Tensor, level: float) -> Tensor:
    """A quantile of every resample, from values in order and the window that each belongs to."""
    reached = counts[:, owners].cumsum(1)
    needed = level * reached[:, -1:]
    return ordered[torch.searchsorted(reached, needed - 1e-9).squeeze(1)]


def _tail(windows: int) -> float:
    """The probability cut off at each end. The quantile of Student's t is its expansion around the normal one."""
    normal = NormalDist()
    z, freedom = normal.inv_cdf((1 + CONFIDENCE) / 2), windows - 1
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return normal.cdf(-t * (windows / freedom) ** 0.5)
