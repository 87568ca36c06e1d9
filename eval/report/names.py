"""Names beside the dots of a drawing. The figure has 72 dots an inch, so its pixels are points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from quantkit.eval.report.labels import Box, Label, place_labels
from quantkit.eval.report.palette import INK, MUTED
from quantkit.eval.report.sheet import POINTS, TEXT
from quantkit.eval.report.svg import clean

_MARK = 13.0  # across, of the largest
_DISTANCE = 8.0  # from a dot's middle to its name
_LEADER = 10.0  # a name farther away than this gets a line
_CRUMB = 3.0  # of a line that is not to be written over
_MARGIN = 12.0  # names may reach so far over the right edge of the axes


def write_names(
    axes: Axes, dots: Sequence[tuple[float, float, str]], lines: Sequence[Sequence[tuple[float, float]]] = ()
) -> None:
    """`dots` are (x, y, name), `lines` are not to be written over; in the axes' own scales, whose limits are final."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    assert figure.dpi == POINTS
    names = [clean(name) for *_, name in dots]
    places = [_pixel(axes, x, y) for x, y, _ in dots]
    labels = [Label(*place, *text_size(figure, name)) for place, name in zip(places, names, strict=True)]
    obstacles = [Box.around(*place, _MARK, _MARK) for place in places]
    obstacles += [box for line in lines for box in _along([_pixel(axes, *point) for point in line])]
    frame = axes.get_window_extent()
    area = Box(frame.x0, frame.y0, frame.x1 + _MARGIN, frame.y1 + 4)
    for dot, name, place, box in zip(
        dots, names, places, place_labels(labels, area, obstacles, _DISTANCE), strict=True
    ):
        _write(axes, dot, name, place, box)


def _write(axes: Axes, dot: tuple[float, float, str], name: str, place: tuple[float, float], box: Box) -> None:
    across, up = box.middle[0] - place[0], box.middle[1] - place[1]
    away = max(abs(across) - (box.right - box.left) / 2, abs(up) - (box.top - box.bottom) / 2)
    leader = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 5}
    axes.annotate(
        name,
        dot[:2],
        (across, up),
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=TEXT,
        color=INK,
        arrowprops=leader if away > _LEADER else None,
        annotation_clip=False,
        zorder=5,
    )


def _along(line: Sequence[tuple[float, float]]) -> Iterator[Box]:
    """Small boxes that cover a line."""
    for (x, y), (next_x, next_y) in pairwise(line):
        steps = max(1, round(max(abs(next_x - x), abs(next_y - y)) / _CRUMB))
        for step in range(steps + 1):
            share = step / steps
            yield Box.around(x + share * (next_x - x), y + share * (next_y - y), _CRUMB, _CRUMB)


def _pixel(axes: Axes, x: float, y: float) -> tuple[float, float]:
    across, up = axes.transData.transform((x, y))
    return float(across), float(up)


def text_size(figure: Figure, text: str) -> tuple[float, float]:
    """Points across and up."""
    found = figure.text(0, 0, text, fontsize=TEXT)
    extent = found.get_window_extent(FigureCanvasAgg(figure).get_renderer())  # type: ignore[no-untyped-call]
    found.remove()
    return extent.width, extent.height
