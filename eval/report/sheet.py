"""A place in a figure where one panel is drawn, measured in points from its upper left corner, downwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

POINTS = 72  # of an inch: a figure with this many dots an inch has points for pixels
HEADING, TEXT, SMALL = 13.5, 12.0, 11.5  # sizes of letters; the least are 10 pixels on a phone


@dataclass(frozen=True, eq=False)
class Sheet:
    figure: Figure
    right: float = 0.0  # its corner, from that of the figure
    down: float = 0.0

    @classmethod
    def new(cls, width: float, height: float) -> Sheet:
        return cls(Figure(figsize=(width / POINTS, height / POINTS), dpi=POINTS))

    def part(self, right: float, down: float) -> Sheet:
        return Sheet(self.figure, self.right + right, self.down + down)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        (x, y), (end, high) = self._share(left, top + height), self._share(left + width, top)
        return self.figure.add_axes((x, y, end - x, high - y))

    def write(self, x: float, y: float, text: str, **style: Any) -> None:
        """One line whose middle is at that height."""
        self.figure.text(*self._share(x, y), text, va="center", **style)

    def fill(self, left: float, top: float, width: float, height: float, colour: str) -> None:
        (x, y), (end, high) = self._share(left, top + height), self._share(left + width, top)
        where = self.figure.transFigure
        self.figure.add_artist(Rectangle((x, y), end - x, high - y, transform=where, facecolor=colour, linewidth=0))

    def _share(self, x: float, y: float) -> tuple[float, float]:
        width, height = (POINTS * length for length in self.figure.get_size_inches())
        return (self.right + x) / width, 1 - (self.down + y) / height
