"""Which charts a comparison has, drawn. Imports matplotlib: only when a report is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from quantkit.eval.compare.results import Comparison
from quantkit.eval.report import heatmap, lines, scatter
from quantkit.eval.report.chart import Chart
from quantkit.eval.report.frontier import frontier
from quantkit.eval.report.palette import MUTED
from quantkit.eval.report.sheet import TEXT, Sheet
from quantkit.eval.report.svg import clean, drawing, inline_svg, png
from quantkit.eval.report.tradeoff import memory_panel, speed_panels

_HEADING = 54  # points above the panels of a picture
_COLUMNS = {1: 1, 2: 2, 3: 3, 4: 2}


@dataclass(frozen=True)
class _Panel:
    width: float
    height: float
    draw: Callable[[Sheet, str], dict[str, str]]  # onto a sheet, with a key for ids; gives tooltips


@dataclass(frozen=True)
class _Plan:
    """A chart before it is drawn."""

    name: str
    title: str
    caption: str
    panels: tuple[_Panel, ...]


def draw_charts(comparison: Comparison) -> list[Chart]:
    """In the order of the report; what was not measured has no chart."""
    plans = (_tradeoff, _memory, _speed, _blocks, _linears)
    with drawing():
        return [_drawn(plan, comparison) for made in plans if (plan := made(comparison)) is not None]


def _tradeoff(comparison: Comparison) -> _Plan | None:
    panels = speed_panels(comparison)
    if not panels:
        return None
    quality = any(found.quality for found in comparison.formats)
    closer = "closer to the original" if quality else "smaller"
    caption = (
        f"Each mark is a format; up is {closer}, right is faster. Filled marks on the line are worth a look: no other "
        f"format is both faster and {closer}."
    )
    if quality:
        caption += " Bars are 95 % confidence intervals. The row at 0 is the unquantized model."
    title = "Quality against speed" if quality else "Size against speed"
    return _Plan("tradeoff", title, caption, tuple(_scatter(panel) for panel in panels))


def _memory(comparison: Comparison) -> _Plan | None:
    panel = memory_panel(comparison)
    if panel is None:
        return None
    caption = (
        "The same loss beside the bytes of the weights; up is closer to the original, left is smaller. Filled marks on "
        f"the line are the frontier, no other format is both smaller and closer: {', '.join(frontier(comparison))}."
    )
    return _Plan("memory", "Quality against memory", caption, (_scatter(panel),))


def _scatter(panel: scatter.Panel) -> _Panel:
    return _Panel(scatter.WIDTH, scatter.HEIGHT, lambda sheet, key: scatter.draw_panel(sheet, panel, key))


def _speed(comparison: Comparison) -> _Plan | None:
    drawn = lines.speed_lines(comparison)
    if drawn is None:
        return None
    caption = (
        "A request alone reads all weights for each token, so smaller weights help it most. Many requests share that "
        "reading; then the arithmetic decides."
    )
    panel = _Panel(lines.WIDTH, lines.HEIGHT, lambda sheet, key: lines.draw_lines(sheet, drawn, key))
    return _Plan("speed", "Speed by batch", caption, (panel,))


def _blocks(comparison: Comparison) -> _Plan | None:
    drawn = heatmap.block_map(comparison)
    if drawn is None:
        return None
    caption = (
        "How far the hidden states have moved from the original's after each block, in percent of their length: "
        "errors of earlier blocks included."
    )
    return _Plan("layers", "Damage by layer", caption, _heat([drawn]))


def _linears(comparison: Comparison) -> _Plan | None:
    maps = heatmap.linear_maps(comparison)
    if not maps:
        return None
    caption = (
        "What each linear adds by itself, in percent of its output, for the formats that lose most. An empty cell was "
        "not quantized."
    )
    return _Plan("linears", "Damage by linear", caption, _heat(maps))


def _heat(maps: Sequence[heatmap.HeatMap]) -> tuple[_Panel, ...]:
    """With one scale, so that the same colour means the same error in all of them."""
    scale = heatmap.HeatScale.over(maps)
    return tuple(_Panel(*drawn.size, partial(_draw_heat, drawn, scale)) for drawn in maps)


def _draw_heat(drawn: heatmap.HeatMap, scale: heatmap.HeatScale, sheet: Sheet, key: str) -> dict[str, str]:
    return heatmap.draw_map(sheet, drawn, scale, key)


def _drawn(plan: _Plan, comparison: Comparison) -> Chart:
    panels = []
    for place, panel in enumerate(plan.panels):
        sheet, key = Sheet.new(panel.width, panel.height), f"{plan.name}-{place}"
        tips = panel.draw(sheet, key)
        panels.append(inline_svg(sheet.figure, key, f"{plan.title}. {plan.caption}", tips))
    wide = max(panel.width for panel in plan.panels) > scatter.WIDTH
    return Chart(plan.name, plan.title, plan.caption, tuple(panels), _picture(plan, comparison, wide), wide)


def _picture(plan: _Plan, comparison: Comparison, wide: bool) -> bytes:
    """All panels in one PNG, under a heading."""
    columns = 1 if wide else _COLUMNS[len(plan.panels)]
    width, height = max(panel.width for panel in plan.panels), max(panel.height for panel in plan.panels)
    sheet = Sheet.new(width * columns, _HEADING + height * -(-len(plan.panels) // columns))
    sheet.write(8, 20, plan.title, fontsize=15, weight="bold")
    where = f"{clean(comparison.model, 32)} on {clean(comparison.machine.device, 24)}"
    sheet.write(8, 41, where, fontsize=TEXT, color=MUTED)
    for place, panel in enumerate(plan.panels):
        panel.draw(sheet.part(place % columns * width, _HEADING + place // columns * height), str(place))
    return png(sheet.figure)
