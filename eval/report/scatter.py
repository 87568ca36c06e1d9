"""Charts with a dot for each format: what is lost against what is gained. Up is always better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from quantkit.eval.report.frontier import unbeaten
from quantkit.eval.report.names import write_names
from quantkit.eval.report.palette import BASELINE_MARKER, GRID, MUTED, Look
from quantkit.eval.report.sheet import HEADING, SMALL, Sheet

WIDTH, HEIGHT = 400, 330  # points of one panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 54, 46
_MARK, _STAR = 9.0, 13.0  # points across


@dataclass(frozen=True)
class Dot:
    """A format. `y` and `spread` are heights: the panel's ticks say what they mean."""

    name: str
    look: Look
    x: float
    y: float
    spread: tuple[float, float] | None
    tip: str


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    better: str  # an arrow
    more_x_is_better: bool
    x_text: Callable[[float], str]
    ticks: tuple[tuple[float, str], ...]  # of y
    dots: tuple[Dot, ...]
    break_at: float | None = None  # a height above which the scale is another one

    def front(self) -> list[Dot]:
        """Dots that no other beats in both directions, from left to right."""
        sign = -1 if self.more_x_is_better else 1
        kept = unbeaten([(sign * dot.x, -dot.y) for dot in self.dots])
        return sorted((dot for dot, is_kept in zip(self.dots, kept, strict=True) if is_kept), key=_from_left)


def _from_left(dot: Dot) -> tuple[float, float]:
    return dot.x, -dot.y


def draw_panel(sheet: Sheet, panel: Panel, key: str) -> dict[str, str]:
    """Gives tooltips by gid."""
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    axes = sheet.axes(_LEFT, _TOP, width, height)
    _scales(axes, panel)
    sheet.write(8, _TOP - 38, panel.title, fontsize=HEADING, weight="bold")
    sheet.write(8, _TOP - 14, panel.y_label, fontsize=SMALL, color=MUTED)
    sheet.write(WIDTH - _RIGHT, _TOP - 14, f"better {panel.better}", fontsize=SMALL, ha="right")
    front = panel.front()
    axes.plot([dot.x for dot in front], [dot.y for dot in front], color=MUTED, linewidth=1.4, zorder=2)
    tips = {}
    for place, dot in enumerate(panel.dots):
        gid = f"tip-{key}-{place}"
        tips[gid] = dot.tip
        _draw_dot(axes, dot, gid, filled=dot in front)
    bars = [[(dot.x, dot.spread[0]), (dot.x, dot.spread[1])] for dot in panel.dots if dot.spread]
    line = [(dot.x, dot.y) for dot in front]
    write_names(axes, [(dot.x, dot.y, dot.name) for dot in panel.dots], [*bars, line])
    return tips


def _scales(axes: Axes, panel: Panel) -> None:
    xs = [dot.x for dot in panel.dots]
    heights = [height for dot in panel.dots for height in (dot.y, *(dot.spread or ()))]
    axes.set_xlim(*_padded(min(xs), max(xs), 0.16))
    low, high = _padded(min(heights), max(heights), 0.1)
    axes.set_ylim(low, high)
    ticks = [(at, text) for at, text in panel.ticks if low <= at <= high]
    axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks])
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: panel.x_text(value)))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=SMALL, pad=5)
    axes.set_xlabel(panel.x_label, fontsize=SMALL)
    if panel.break_at is not None:
        axes.axhline(panel.break_at, color=MUTED, linewidth=1, linestyle=(0, (1, 3)), zorder=1)


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    span = (high - low) or abs(high) or 1.0
    return low - share * span, high + share * span


def _draw_dot(axes: Axes, dot: Dot, gid: str, filled: bool) -> None:
    if dot.spread is not None:
        axes.plot([dot.x, dot.x], dot.spread, color=dot.look.colour, linewidth=1.6, zorder=3)
    axes.plot(
        [dot.x],
        [dot.y],
        gid=gid,
        marker=dot.look.marker,
        markersize=_STAR if dot.look.marker == BASELINE_MARKER else _MARK,
        color=dot.look.colour,
        markerfacecolor=dot.look.colour if filled else "none",
        markeredgewidth=1.6,
        zorder=4,
        clip_on=False,
    )
