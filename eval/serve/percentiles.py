"""Percentiles of measured times: linear between the two nearest, as numpy's default."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Of many times, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of_seconds(cls, times: Sequence[float]) -> Spread | None:
        """None where there is none."""
        if not times:
            return None
        ordered = sorted(times)
        marks = (1e3 * percentile(ordered, percent) for percent in (50, 95, 99))
        return cls(1e3 * math.fsum(ordered) / len(ordered), *marks)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of a sequence that is sorted and not empty."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
