"""Heights for charts where up is better: KL divergence on a log scale, and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.eval.quality.bootstrap import Interval
from quantkit.eval.report.numbers import is_no_divergence
from quantkit.wording import human_bytes

_LEAST = 1e-6  # nats: what is closer to nothing is drawn there
Ticks = tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class LossScale:
    """Decades of KL divergence, the less the higher; no divergence at all stands in a row of its own above."""

    low: float  # log10 of the largest and the smallest divergence
    high: float

    @classmethod
    def over(cls, values: Sequence[Interval]) -> LossScale:
        bounds = [bound for value in values for bound in (value.value, value.low, value.high) if bound is not None]
        drawn = [bound for bound in bounds if math.isfinite(bound) and not is_no_divergence(bound)]
        logs = [math.log10(max(bound, _LEAST)) for bound in drawn] or [-3.0, -1.0]
        return cls(-max(logs), -min(logs))

    @property
    def nothing(self) -> float:
        return self.high + 0.2 * max(1.0, self.high - self.low)

    @property
    def break_at(self) -> float:
        return (self.high + self.nothing) / 2

    def height(self, nats: float) -> float:
        return self.nothing if is_no_divergence(nats) else -math.log10(max(nats, _LEAST))

    def spread(self, value: Interval) -> tuple[float, float] | None:
        if value.low is None or value.high is None or is_no_divergence(value.value):
            return None
        return self.height(value.high), self.height(value.low)

    def ticks(self) -> Ticks:
        decades = self.high - self.low
        steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if decades < 0.6 else (1, 2, 5) if decades < 1.5 else (1,)
        powers = range(math.floor(-self.high) - 1, math.ceil(-self.low) + 2)
        marks = [step * 10.0**power for power in powers for step in steps]
        inside = [mark for mark in marks if self.low - 0.3 <= -math.log10(mark) <= self.break_at]
        return ((self.nothing, "0"), *((-math.log10(mark), f"{mark:.6f}".rstrip("0").rstrip(".")) for mark in inside))


@dataclass(frozen=True)
class SizeScale:
    """Bytes, the fewer the higher."""

    most: int

    def height(self, count: float) -> float:
        return -count

    def ticks(self) -> Ticks:
        step = _round_step(self.most / 4)
        return tuple((-step * number, bytes_tick(step * number)) for number in range(6))


def bytes_tick(count: float) -> str:
    """`250 MB`, `1.5 GB`."""
    number, _, unit = human_bytes(max(0.0, count)).partition(" ")
    return f"{float(number):g} {unit}"


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(max(step, 1.0)))
    return min(round_step for round_step in (1, 2, 2.5, 5, 10) if round_step * power >= step) * power
