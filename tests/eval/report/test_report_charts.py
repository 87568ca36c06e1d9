"""The charts: nothing covers anything, text is text, colours work in the dark, in grey and without colour."""

import re
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from quantkit.eval.compare.results import Comparison
from quantkit.eval.report import heatmap, lines, palette
from quantkit.eval.report.labels import Box
from quantkit.eval.report.scatter import HEIGHT, WIDTH, Dot, Panel, draw_panel
from quantkit.eval.report.sheet import Sheet
from quantkit.eval.report.svg import clean, drawing, inline_svg
from quantkit.eval.report.tradeoff import batches, looks, memory_panel, speed_panels

Variants = Callable[[str], Comparison]
STYLE = Path(palette.__file__).parent.joinpath("style", "colours.css").read_text(encoding="utf-8")
PHONE = 358  # pixels beside the page's margins


@pytest.fixture(autouse=True)
def styled() -> Iterator[None]:
    with drawing():
        yield


def panels(variants: Variants) -> Iterator[Panel]:
    for name in ("full", "cpu", "shape", "hostile", "no-speeds"):
        comparison = variants(name)
        yield from speed_panels(comparison)
        memory = memory_panel(comparison)
        if memory is not None:
            yield memory


def boxes(figure: Figure) -> list[Box]:
    """Where the names stand, in points from the lower left."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    found = []
    for text in figure.findobj(Annotation):
        if isinstance(text, Annotation):
            text.update_positions(renderer)  # without this an annotation stands nowhere yet
            extent = Text.get_window_extent(text, renderer)  # without its leader
            found.append(Box(extent.x0, extent.y0, extent.x1, extent.y1))
    return found


def test_names_cover_neither_each_other_nor_a_dot(variants: Variants) -> None:
    drawn = 0
    for panel in panels(variants):
        sheet = Sheet.new(WIDTH, HEIGHT)
        draw_panel(sheet, panel, "key")
        names = boxes(sheet.figure)
        assert len(names) == len(panel.dots)
        for one, other in combinations(names, 2):
            assert one.overlap(other) == 0
        places = sheet.figure.axes[0].transData.transform([(dot.x, dot.y) for dot in panel.dots])
        for name in names:
            assert Box(0, 0, WIDTH, HEIGHT).holds(name)
            assert all(name.overlap(Box.around(x, y, 6, 6)) == 0 for x, y in places)
        drawn += 1
    assert drawn > 10


def test_names_at_the_ends_of_lines_stand_apart(full: Comparison) -> None:
    drawn = lines.speed_lines(full)
    assert drawn is not None
    assert drawn.relative
    sheet = Sheet.new(lines.WIDTH, lines.HEIGHT)
    tips = lines.draw_lines(sheet, drawn, "key")
    names = boxes(sheet.figure)
    assert len(names) == 7
    for one, other in combinations(names, 2):
        assert one.overlap(other) == 0
    assert all(Box(0, 0, lines.WIDTH, lines.HEIGHT).holds(name) for name in names)
    assert "gptq-w4g128, 8 at once: 4,822 tokens per second, 1.55× the unquantized model" in tips.values()  # noqa: RUF001


def test_front_is_what_nothing_beats() -> None:
    def dot(name: str, x: float, y: float) -> Dot:
        return Dot(name, palette.look(0), x, y, None, "")

    dots = (dot("a", 1, 9), dot("beaten", 2, 3), dot("b", 3, 5), dot("c", 4, 1), dot("twin", 4, 1), dot("low", 4, 0))
    faster = Panel("", "", "", "", True, str, (), dots)
    assert [one.name for one in faster.front()] == ["a", "b", "c", "twin"]
    smaller = Panel("", "", "", "", False, str, (), dots)
    assert [one.name for one in smaller.front()] == ["a"]


def test_svg_keeps_text_gives_tooltips_and_leaves_colours_to_the_page(full: Comparison) -> None:
    panel = speed_panels(full)[0]
    sheet = Sheet.new(WIDTH, HEIGHT)
    drawn = inline_svg(sheet.figure, "name", "in words", draw_panel(sheet, panel, "0"))
    for found in full.formats:
        assert (f">{found.name}</text>" in drawn) == (found.name != "fp8")  # it has no speed
    assert "awq-w4g128 (W4 g128 asym)\nKL divergence 0.0329 [0.0309, 0.0349]\n671 tokens per second\n112.91 MB" in drawn
    assert 'aria-label="in words"' in drawn
    assert not re.search(r"#[0-9a-fA-F]{6}", drawn), "a colour that the page cannot change"
    assert "font-family" not in drawn
    assert "xmlns" not in drawn
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", drawn)]
    assert min(sizes) * PHONE / WIDTH >= 10


def colours(dark: bool) -> dict[str, str]:
    light, night = STYLE.split("@media screen and (prefers-color-scheme: dark)")
    found = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", light.split("}")[0]))
    return found | dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", night.split("}")[0])) if dark else found


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_every_colour_can_be_read(dark: bool) -> None:
    found = colours(dark)
    for ground in ("--paper", "--card", "--sunken"):
        for ink in ("--text", "--muted", "--accent", "--bad", "--chart-ink", "--chart-muted"):
            assert contrast(found[ink], found[ground]) >= 4.5, (ink, ground)
    for place in range(len(palette.SERIES)):
        assert contrast(found[f"--series-{place}"], found["--card"]) >= 3
    assert contrast(found["--text"], found["--mark"]) >= 4.5
    for step in range(len(palette.HEAT)):
        ink = "--chart-high-text" if step >= heatmap.DARK_FROM else "--chart-low-text"
        assert contrast(found[ink], found[f"--heat-{step}"]) >= 4.5, step
    assert {name for name in palette.VARIABLES.values() if name != "--chart-paper"} <= set(found)


@pytest.mark.parametrize("dark", [False, True])
def test_heat_has_an_order_in_grey(dark: bool) -> None:
    found = colours(dark)
    steps = [luminance(found[f"--heat-{place}"]) for place in range(len(palette.HEAT))]
    assert all((later > earlier) == dark for earlier, later in pairwise(steps))
    assert all(
        contrast(found[f"--heat-{place}"], found[f"--heat-{place + 1}"]) > 1.1 for place in range(len(steps) - 1)
    )


def test_formats_differ_without_colour(full: Comparison) -> None:
    markers = [look.marker for look in looks(full).values()]
    assert len(set(markers)) == len(full.formats)
    assert len({palette.look(place) for place in range(30)}) == 30


def test_heat_map_says_where_the_damage_is(full: Comparison) -> None:
    blocks = heatmap.block_map(full)
    assert blocks is not None
    assert [name for name, _ in blocks.rows] == [found.name for found in full.formats if not found.baseline]
    worst = heatmap.linear_maps(full)
    assert [drawn.title.rpartition(" ")[2] for drawn in worst] == ["rtn-w2g64", "gptq-w3g128"]
    scale = heatmap.HeatScale.over(worst)
    errors = [error for drawn in worst for _, row in drawn.rows for error in row if error is not None]
    assert {scale.step(min(errors)), scale.step(max(errors))} == {0, len(palette.HEAT) - 1}
    many = heatmap.HeatMap("80 layers", (("q_proj", [0.1] * 80),))
    assert many.size[0] > WIDTH
    assert len(heatmap.draw_map(Sheet.new(*many.size), many, scale, "k")) == 80


def test_panels_of_many_batches(variants: Variants) -> None:
    assert batches(variants("full")) == [1, 8, 32, 256]
    assert batches(variants("cpu")) == [1, 8]
    assert batches(variants("no-speeds")) == []
    assert lines.speed_lines(variants("no-speeds")) is None


def test_names_in_drawings_are_short_and_printable() -> None:
    assert clean("a\x00b\n c") == "a b c"
    assert clean("x" * 40) == "x" * 25 + "…"
