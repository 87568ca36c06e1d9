"""Where the damage is: relative errors by layer, a row for each format or for each linear of one format.

Colours stand for eight steps of a log scale, so that the page can choose them for light and dark, and the order shows
in grey; where there is room the numbers stand in the cells too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from quantkit.eval.compare.results import Comparison, LayerDamage
from quantkit.eval.report.numbers import significant
from quantkit.eval.report.palette import GRID, HEAT, MUTED, ON_DARK_CELL, ON_LIGHT_CELL
from quantkit.eval.report.sheet import HEADING, SMALL, Sheet
from quantkit.eval.report.svg import clean

_LEFT, _RIGHT, _TOP, _BOTTOM = 126, 8, 62, 26
_ROW, _LEAST_CELL, _MOST_CELL, _NUMBERED = 26.0, 11.0, 46.0, 38.0  # points
_WIDTH = 400.0  # where the layers fit
DARK_FROM = 5  # of HEAT: cells that need light letters
WORST_FORMATS = 2

Row = tuple[str, Sequence[float | None]]


@dataclass(frozen=True)
class HeatMap:
    title: str
    rows: tuple[Row, ...]  # a name, and an error for each layer

    @property
    def layers(self) -> int:
        return max(len(errors) for _, errors in self.rows)

    @property
    def cell(self) -> float:
        """Its width. Numbers make cells wide; many layers make them narrow."""
        room = (_WIDTH - _LEFT - _RIGHT) / self.layers
        return min(_MOST_CELL, max(room, _NUMBERED if self.layers <= 16 else _LEAST_CELL))

    @property
    def size(self) -> tuple[float, float]:
        return max(_WIDTH, _LEFT + self.cell * self.layers + _RIGHT), _TOP + _ROW * len(self.rows) + _BOTTOM


def block_map(comparison: Comparison) -> HeatMap | None:
    """What has piled up after every block, a row for each format."""
    rows = tuple((name, damage.blocks) for name, damage in _damaged(comparison))
    return HeatMap("Error after each block", rows) if rows else None


def linear_maps(comparison: Comparison) -> list[HeatMap]:
    """What each linear adds, for the formats that lose most and for no more than `WORST_FORMATS` of them."""
    worst = sorted(_damaged(comparison), key=lambda found: -found[1].blocks[-1])[:WORST_FORMATS]
    return [
        HeatMap(f"Linears of {clean(name)}", tuple(damage.linears.items())) for name, damage in worst if damage.linears
    ]


def _damaged(comparison: Comparison) -> list[tuple[str, LayerDamage]]:
    return [(found.name, found.damage) for found in comparison.formats if found.damage and found.damage.blocks]


@dataclass(frozen=True)
class HeatScale:
    """Steps of equal ratio between the smallest and the largest error."""

    low: float
    high: float

    @classmethod
    def over(cls, maps: Sequence[HeatMap]) -> HeatScale:
        errors = [error for one in maps for _, row in one.rows for error in row if error]
        low, high = min(errors, default=0.01), max(errors, default=1.0)
        return cls(low, high if high > low * 1.01 else low * 10)

    def step(self, error: float) -> int:
        if error <= self.low:
            return 0
        share = math.log(error / self.low) / math.log(self.high / self.low)
        return min(len(HEAT) - 1, int(share * len(HEAT)))


def draw_map(sheet: Sheet, drawn: HeatMap, scale: HeatScale, key: str) -> dict[str, str]:
    """Gives tooltips by gid."""
    down = _ROW * len(drawn.rows)
    axes = sheet.axes(_LEFT, _TOP, drawn.cell * drawn.layers, down)
    sheet.write(8, _TOP - 46, drawn.title, fontsize=HEADING, weight="bold")
    sheet.write(_LEFT - 5, _TOP + down + 10, "layer", fontsize=SMALL, color=MUTED, ha="right")
    _legend(sheet, scale)
    _ticks(axes, drawn)
    tips: dict[str, str] = {}
    for row, (name, errors) in enumerate(drawn.rows):
        for layer, error in enumerate(errors):
            gid = f"tip-{key}-{row}-{layer}"
            tips[gid] = f"{name}, layer {layer}: " + ("not quantized" if error is None else percent(error))
            _cell(axes, (layer, row), error, scale, gid)
            if error is not None and drawn.cell >= _NUMBERED:
                _number(axes, (layer, row), error, scale)
    return tips


def _ticks(axes: Axes, drawn: HeatMap) -> None:
    axes.set_xlim(0, drawn.layers)
    axes.set_ylim(len(drawn.rows), 0)
    axes.set_facecolor("none")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    shown = range(0, drawn.layers, max(1, math.ceil(22 / drawn.cell)))
    axes.set_xticks([layer + 0.5 for layer in shown], [str(layer) for layer in shown])
    axes.set_yticks([row + 0.5 for row in range(len(drawn.rows))], [clean(name, 17) for name, _ in drawn.rows])
    axes.tick_params(length=0, labelsize=SMALL, pad=4)


def percent(error: float) -> str:
    return f"{significant(100 * error)} %"


def _cell(axes: Axes, place: tuple[int, int], error: float | None, scale: HeatScale, gid: str) -> None:
    fill, edge = ("none", 1.0) if error is None else (HEAT[scale.step(error)], 0.0)
    corner = (place[0] + 0.03, place[1] + 0.04)
    axes.add_patch(Rectangle(corner, 0.94, 0.92, gid=gid, facecolor=fill, edgecolor=GRID, linewidth=edge))


def _number(axes: Axes, place: tuple[int, int], error: float, scale: HeatScale) -> None:
    colour = ON_DARK_CELL if scale.step(error) >= DARK_FROM else ON_LIGHT_CELL
    middle = (place[0] + 0.5, place[1] + 0.52)
    axes.text(*middle, significant(100 * error, 2), ha="center", va="center", fontsize=SMALL, color=colour)


def _legend(sheet: Sheet, scale: HeatScale) -> None:
    """A swatch for each step, with the errors at both ends."""
    start, side, middle = 68, 15, _TOP - 16
    sheet.write(start - 6, middle, percent(scale.low), fontsize=SMALL, color=MUTED, ha="right")
    for step, colour in enumerate(HEAT):
        sheet.fill(start + step * side, middle - 6, side, 12, colour)
    sheet.write(start + side * len(HEAT) + 6, middle, percent(scale.high), fontsize=SMALL, color=MUTED)
