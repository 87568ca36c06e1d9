"""Many groups of layers, one budget of bits: which scheme each group takes so that the sum of losses is least.

A knapsack in which every group takes exactly one item, solved by dynamic programming over the bits spent beyond the
smallest schemes. Layers of a model come in few shapes, so these bits have a large common divisor and the table is
small and the answer exact. Where they have not, sizes are rounded up to a unit fine enough not to matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UNITS = 1 << 17  # columns of the table at most; a model of 640 groups then wastes less than 0.5 % of the bits


@dataclass(frozen=True)
class Option:
    """One way to store a group: its size and what is lost by it."""

    bits: int
    loss: float


def allocate(groups: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """The index of the option that each group takes; of equal sums the first. The smallest options must fit."""
    smallest = [min(option.bits for option in options) for options in groups]
    free = budget - sum(smallest)
    assert free >= 0, "the smallest options exceed the budget"
    more = [[option.bits - least for option in options] for options, least in zip(groups, smallest, strict=True)]
    free = min(free, sum(map(max, more)))
    unit = max(math.gcd(*(bits for each in more for bits in each)), -(-free // UNITS), 1)
    sizes = [[-(-bits // unit) for bits in each] for each in more]
    losses = [[option.loss for option in options] for options in groups]
    return _least(losses, sizes, free // unit)


def _least(losses: list[list[float]], sizes: list[list[int]], room: int) -> list[int]:
    """Row by row the least loss of the groups so far for every number of units, then back along what was taken."""
    best = np.zeros(room + 1)
    taken = np.zeros((len(losses), room + 1), dtype=np.uint8)  # [groups, units]
    for group, (lost, size) in enumerate(zip(losses, sizes, strict=True)):
        reached = np.full(room + 1, np.inf)
        for option in range(len(lost)):
            if size[option] > room:
                continue
            tried = best[: room + 1 - size[option]] + lost[option]
            better = tried < reached[size[option] :]
            reached[size[option] :][better] = tried[better]
            taken[group, size[option] :][better] = option
        best = reached
    chosen = []
    for group in reversed(range(len(losses))):
        chosen.append(int(taken[group, room]))
        room -= sizes[group][chosen[-1]]
    return chosen[::-1]
