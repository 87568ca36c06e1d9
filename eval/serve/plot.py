"""The plot of a benchmark: how the waiting times of each load are distributed, as SVG, alone or in an HTML page.

Written by hand so that the file needs nothing from anywhere: no library, no network, no font.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from quantkit.errors import InputError, StorageError
from quantkit.eval.serve.percentiles import Spread, percentile
from quantkit.eval.serve.results import ServeRow

KINDS = (".svg", ".html")
_WIDTH, _PANEL_HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 66, 44
_LEGEND_ROW, _LEGEND_COLUMNS = 20, 4
_POINTS = 200  # of each line
# Okabe and Ito's colours, which people who see colours differently can tell apart; then dashes tell loads apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_DASHES = ("", "6 3", "2 3")
_PANELS = (
    ("ttft", "Time to first token", "ms from request to first token", "% of requests"),
    ("itl", "Gaps between tokens", "ms between two events", "% of gaps"),
)


@dataclass(frozen=True)
class _Line:
    """Of one load; times in milliseconds, sorted."""

    name: str
    times: list[float]
    place: int

    @property
    def style(self) -> str:
        colour = _COLOURS[self.place % len(_COLOURS)]
        dash = _DASHES[self.place // len(_COLOURS) % len(_DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        return f'fill="none" stroke="{colour}" stroke-width="2"{dashed}'

    def points(self) -> Iterator[tuple[float, float]]:
        """(time, percent of times that are at most that long)."""
        count = min(_POINTS, len(self.times))
        for step in range(count):
            percent = 100.0 * step / max(1, count - 1)
            yield percentile(self.times, percent), percent


@dataclass(frozen=True)
class _Axis:
    """Milliseconds on a logarithmic scale."""

    low: float
    high: float
    left: float

    @classmethod
    def over(cls, times: Sequence[float], left: float) -> _Axis:
        """Ends at 1, 2 or 5 times a power of ten. Gaps of nothing (events that came together) stand at the left end."""
        positive = [time for time in times if time > 0] or [1.0]
        ordered = sorted(positive)
        low, high = _round_down(percentile(ordered, 1)), _round_up(ordered[-1])
        return cls(low, high if high > low else low * 10, left)

    def x(self, time: float) -> float:
        inside = min(max(time, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.left + share * (_WIDTH - _LEFT - _RIGHT)

    def ticks(self) -> list[float]:
        """1, 2, 5, 10 ... where there is room, else powers of ten."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = (1.0, 2.0, 5.0) if last - first <= 3 else (1.0,)
        found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]


def check_plot(file: Path) -> None:
    """Before anything is measured: a name whose kind is known, in a folder that is there."""
    if file.suffix.lower() not in KINDS:
        raise InputError(f"--plot is '{file}', but must end with {' or '.join(KINDS)}")
    if not file.parent.is_dir():
        raise StorageError(f"--plot is '{file}', but there is no folder {file.parent}")


def write_plot(file: Path, title: str, rows: Sequence[ServeRow]) -> None:
    drawn = svg(title, rows)
    text = drawn if file.suffix.lower() == ".svg" else _page(title, drawn, rows)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {file}: {error.strerror}; choose another --plot") from error


def svg(title: str, rows: Sequence[ServeRow]) -> str:
    """Two panels side by side, a line for each load."""
    legend_rows = math.ceil(len(rows) / _LEGEND_COLUMNS)
    width = _WIDTH * len(_PANELS)
    height = _TOP + _PANEL_HEIGHT + _BOTTOM + legend_rows * _LEGEND_ROW + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for place, (time, heading, x_label, y_label) in enumerate(_PANELS):
        lines = [
            _Line(row.measured.load.name, sorted(1e3 * seconds for seconds in row.times(time)), number)
            for number, row in enumerate(rows)
        ]
        parts += _panel(heading, x_label, y_label, lines, place * _WIDTH + _LEFT)
    parts += _legend(rows)
    return "\n".join([*parts, "</svg>", ""])


def _panel(heading: str, x_label: str, y_label: str, lines: list[_Line], left: float) -> Iterator[str]:
    axis = _Axis.over([time for line in lines for time in line.times], left)
    right, bottom = left + _WIDTH - _LEFT - _RIGHT, _TOP + _PANEL_HEIGHT
    yield f'<text x="{left}" y="{_TOP - 14}" font-weight="600">{heading}</text>'
    for percent in (0, 25, 50, 75, 95, 100):
        y = _y(percent)
        yield f'<path d="M{left} {y:.1f}H{right}" stroke="#e2e2e2"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{percent}</text>'
    for tick in axis.ticks():
        x = axis.x(tick)
        yield f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#e2e2e2"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,.10g}</text>'
    yield f'<path d="M{left} {_TOP}V{bottom}H{right}" fill="none" stroke="#666"/>'
    middle = (left + right) / 2
    yield f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">{x_label} (log scale)</text>'
    turned = f"translate({left - 40} {(_TOP + bottom) / 2}) rotate(-90)"
    yield f'<text transform="{turned}" text-anchor="middle">{y_label}, at most as long</text>'
    for line in lines:
        if line.times:
            points = " ".join(f"{axis.x(time):.1f},{_y(percent):.1f}" for time, percent in line.points())
            yield f'<polyline points="{points}" {line.style}><title>{escape(_summary(line))}</title></polyline>'


def _legend(rows: Sequence[ServeRow]) -> Iterator[str]:
    top = _TOP + _PANEL_HEIGHT + _BOTTOM + 14
    column = (_WIDTH * len(_PANELS) - _LEFT - _RIGHT) / _LEGEND_COLUMNS
    for place, row in enumerate(rows):
        x, y = _LEFT + place % _LEGEND_COLUMNS * column, top + place // _LEGEND_COLUMNS * _LEGEND_ROW
        name = row.measured.load.name
        yield f'<path d="M{x:.1f} {y - 4}h24" {_Line(name, [], place).style}/>'
        yield f'<text x="{x + 30:.1f}" y="{y}">{escape(name)}</text>'


def _page(title: str, drawn: str, rows: Sequence[ServeRow]) -> str:
    """The plot with the numbers below it."""
    columns = ("load", "output tokens/s", *(f"{time} ms {mark}" for time in ("TTFT", "ITL") for mark in ("p50", "p99")))
    cells = []
    for row in rows:
        spreads = [row.spread("ttft"), row.spread("itl")]
        marks = [f"{mark:,.1f}" for spread in spreads for mark in ((spread.p50, spread.p99) if spread else ())]
        tokens = row.to_dict()["output_tokens_per_second"]
        cells.append((row.measured.load.name, f"{tokens:,.1f}", *(marks or ["-"] * 4)))
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in cells)
    style = (
        "body{font:14px system-ui,sans-serif;margin:24px;background:#fff;color:#222}svg{max-width:100%;height:auto}"
        "table{border-collapse:collapse;margin-top:16px}th,td{padding:4px 12px;text-align:right;"
        "border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head><body>\n{drawn}'
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></body></html>\n"
    )


def _y(percent: float) -> float:
    return _TOP + _PANEL_HEIGHT * (1 - percent / 100)


def _summary(line: _Line) -> str:
    spread = Spread.of_seconds([time / 1e3 for time in line.times])
    assert spread is not None
    return f"{line.name}: p50 {spread.p50:.1f} ms, p95 {spread.p95:.1f} ms, p99 {spread.p99:.1f} ms"


def _round_down(time: float) -> float:
    power = 10.0 ** math.floor(math.log10(time))
    return max(step for step in (1.0, 2.0, 5.0) if step * power <= time * 1.001) * power


def _round_up(time: float) -> float:
    power = 10.0 ** math.floor(math.log10(time))
    return min(step for step in (1.0, 2.0, 5.0, 10.0) if step * power >= time * 0.999) * power
