"""Speed by batch: how many times as fast as the unquantized model each format is, as more requests run at once."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from quantkit.eval.compare.results import Comparison, FormatResult, Speed
from quantkit.eval.report import numbers
from quantkit.eval.report.labels import spread_out
from quantkit.eval.report.names import text_size
from quantkit.eval.report.palette import BASELINE_MARKER, GRID, INK, MUTED, PAPER, Look
from quantkit.eval.report.sheet import SMALL, TEXT, Sheet
from quantkit.eval.report.svg import clean
from quantkit.eval.report.tradeoff import looks

WIDTH, HEIGHT = 400, 330
_LEFT, _TOP, _BOTTOM = 46, 34, 46
_GAP = 12.0  # from the axes to the names
_LINE = 15.0  # from one name to the next
_MOST_LETTERS = 18


@dataclass(frozen=True)
class Line:
    name: str
    look: Look
    points: tuple[tuple[int, float], ...]  # batch, height
    tips: tuple[str, ...]


@dataclass(frozen=True)
class SpeedLines:
    lines: tuple[Line, ...]
    relative: bool  # heights are speeds beside the unquantized model's


def speed_lines(comparison: Comparison) -> SpeedLines | None:
    """None where fewer than two batches were measured: then a table says it better."""
    timed = [found for found in comparison.formats if found.running and len(found.running.speeds) > 1]
    if not timed:
        return None
    base = next((found for found in timed if found.baseline), None)
    rates = {speed.batch: speed.tokens_per_second for speed in _speeds(base)} if base else {}
    styles, found = looks(comparison), []
    for one in timed:
        speeds = [speed for speed in _speeds(one) if not rates or speed.batch in rates]
        points = tuple((speed.batch, speed.tokens_per_second / rates.get(speed.batch, 1.0)) for speed in speeds)
        found.append(Line(one.name, styles[one.name], points, tuple(_tip(one, speed, rates) for speed in speeds)))
    return SpeedLines(tuple(found), bool(rates))


def draw_lines(sheet: Sheet, drawn: SpeedLines, key: str) -> dict[str, str]:
    """Gives tooltips by gid."""
    names = max(text_size(sheet.figure, clean(line.name, _MOST_LETTERS))[0] for line in drawn.lines)
    axes = sheet.axes(_LEFT, _TOP, WIDTH - _LEFT - names - _GAP - 4, HEIGHT - _TOP - _BOTTOM)
    title = "speed, times the unquantized model's" if drawn.relative else "tokens per second"
    sheet.write(8, _TOP - 18, title, fontsize=SMALL, color=MUTED)
    batches = sorted({batch for line in drawn.lines for batch, _ in line.points})
    _scales(axes, drawn, batches)
    tips: dict[str, str] = {}
    for place, line in enumerate(drawn.lines):
        xs = [batches.index(batch) for batch, _ in line.points]
        axes.plot(xs, [y for _, y in line.points], color=line.look.colour, linestyle=line.look.dash, linewidth=1.8)
        for step, (x, (_, y)) in enumerate(zip(xs, line.points, strict=True)):
            gid = f"tip-{key}-{place}-{step}"
            tips[gid] = line.tips[step]
            _mark(axes, x, y, line.look, gid)
    _name_ends(axes, drawn, batches)
    return tips


def _scales(axes: Axes, drawn: SpeedLines, batches: list[int]) -> None:
    heights = [value for line in drawn.lines for _, value in line.points]
    span = max(heights) - min(heights) or max(heights)
    axes.set_xlim(-0.15, len(batches) - 0.85)
    axes.set_ylim(min(heights) - 0.08 * span, max(heights) + 0.08 * span)
    axes.set_xticks(range(len(batches)), [f"{batch:,}" for batch in batches])
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×" if drawn.relative else f"{value:,.5g}"))  # noqa: RUF001
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=SMALL, pad=5)
    axes.set_xlabel("requests at once", fontsize=SMALL)


def _mark(axes: Axes, x: float, y: float, look: Look, gid: str) -> None:
    axes.plot(
        [x],
        [y],
        gid=gid,
        marker=look.marker,
        markersize=12 if look.marker == BASELINE_MARKER else 8,
        color=look.colour,
        markeredgecolor=PAPER,
        markeredgewidth=0.8,
        zorder=4,
        clip_on=False,
    )


def _name_ends(axes: Axes, drawn: SpeedLines, batches: list[int]) -> None:
    """Each name at the right end of its line, moved up or down until they stand apart, with a thin line to it."""
    frame = axes.get_window_extent()
    ends = [(batches.index(line.points[-1][0]), line.points[-1][1]) for line in drawn.lines]
    pixels = [axes.transData.transform(end) for end in ends]
    heights = spread_out([float(up) for _, up in pixels], _LINE, float(frame.y0), float(frame.y1))
    leader = {"arrowstyle": "-", "linewidth": 0.8, "shrinkA": 1, "shrinkB": 6, "relpos": (0, 0.5)}
    for line, end, (across, up), height in zip(drawn.lines, ends, pixels, heights, strict=True):
        axes.annotate(
            clean(line.name, _MOST_LETTERS),
            end,
            (frame.x1 - across + _GAP, height - up),
            textcoords="offset points",
            va="center",
            fontsize=TEXT,
            color=INK,
            arrowprops=leader | {"color": line.look.colour},
            annotation_clip=False,
        )


def _speeds(found: FormatResult | None) -> tuple[Speed, ...]:
    return found.running.speeds if found and found.running else ()


def _tip(found: FormatResult, speed: Speed, base: dict[int, float]) -> str:
    text = f"{found.name}, {speed.batch} at once: {numbers.rate(speed.tokens_per_second)} tokens per second"
    if speed.batch not in base:
        return text
    return f"{text}, {numbers.times(speed.tokens_per_second / base[speed.batch])} the unquantized model"
