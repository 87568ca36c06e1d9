"""Places for labels beside points, so that no label covers a point, another label or the edge.

Labels are placed one after the other, those with the most neighbours first, each at the nearest free place around its
point: a few directions, then wider rings. All lengths are those of the drawing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_DIRECTIONS = (0.0, 180.0, 90.0, 270.0, 35.0, 145.0, 325.0, 215.0)  # degrees: right, left, above, below, corners
_STEP, _RINGS = 5.0, 30
GAP = 1.5  # at least, between any two things


@dataclass(frozen=True)
class Box:
    left: float
    bottom: float
    right: float
    top: float

    @classmethod
    def around(cls, x: float, y: float, width: float, height: float) -> Box:
        return cls(x - width / 2, y - height / 2, x + width / 2, y + height / 2)

    def overlap(self, other: Box, gap: float = 0.0) -> float:
        """The shared area; `gap` widens one of them."""
        width = min(self.right, other.right) - max(self.left, other.left) + gap
        height = min(self.top, other.top) - max(self.bottom, other.bottom) + gap
        return max(0.0, width) * max(0.0, height)

    def holds(self, other: Box) -> bool:
        sideways = self.left <= other.left and other.right <= self.right
        return sideways and self.bottom <= other.bottom and other.top <= self.top

    @property
    def middle(self) -> tuple[float, float]:
        return (self.left + self.right) / 2, (self.bottom + self.top) / 2


@dataclass(frozen=True)
class Label:
    """A text's size, and the point that it belongs to."""

    x: float
    y: float
    width: float
    height: float


def place_labels(labels: Sequence[Label], area: Box, obstacles: Sequence[Box], distance: float) -> list[Box]:
    """A box for each label. `distance` is the least from the point's middle to the box."""
    placed: dict[int, Box] = {}
    for index in sorted(range(len(labels)), key=lambda index: (-_neighbours(labels[index], labels), index)):
        taken = [*obstacles, *placed.values()]
        placed[index] = _first_free(labels[index], area, taken, distance)
    return [placed[index] for index in range(len(labels))]


def _neighbours(label: Label, labels: Sequence[Label]) -> int:
    reach = max(label.width, 40.0)
    return sum(abs(other.x - label.x) < reach and abs(other.y - label.y) < 3 * label.height for other in labels)


def _first_free(label: Label, area: Box, taken: Sequence[Box], distance: float) -> Box:
    """The first place that is free; where none is, the one that hides least."""
    best, least = Box.around(label.x, label.y, label.width, label.height), math.inf
    for box in _candidates(label, distance):
        if not area.holds(box):
            continue
        hidden = sum(box.overlap(other, GAP) for other in taken)
        if hidden == 0:
            return box
        if hidden < least:
            best, least = box, hidden
    return best


def _candidates(label: Label, distance: float) -> Iterator[Box]:
    for ring in range(_RINGS):
        directions = _DIRECTIONS if ring < 2 else [15.0 * step for step in range(24)]
        for degrees in directions:
            reach = distance + ring * _STEP
            across, up = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
            x = label.x + across * (reach + label.width / 2)
            y = label.y + up * (reach + label.height / 2)
            yield Box.around(x, y, label.width, label.height)


def spread_out(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights at least `gap` apart, in the same order, near to where they were; between low and high if they fit."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    places: list[float] = []
    for index in order:
        places.append(max(heights[index], places[-1] + gap if places else low))
    top = max(high, low + gap * (len(places) - 1))
    for at in reversed(range(len(places))):
        places[at] = min(places[at], top)
        top = places[at] - gap
    return [places[order.index(index)] for index in range(len(heights))]
