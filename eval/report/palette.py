"""Colours and marks of the charts.

Charts are drawn once, in the colours of light paper. In SVG every colour here becomes a CSS variable, so that the page
can show the same drawing on a dark ground; the PNG keeps the colours. Formats differ in shape, label and colour.
"""

from __future__ import annotations

from dataclasses import dataclass

INK, MUTED, GRID, PAPER = "#1b1f24", "#57606a", "#dfe3e8", "#fffffe"  # not pure white: others use that name for theirs
# Okabe and Ito's colours, their yellow darkened: people who see colours differently can tell them apart.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#aa3377", "#3a9bdc", "#b27800", "#6a51a3")
# From little to much, with equal steps of lightness, so that a grey print shows the same order.
HEAT = ("#f4f1e6", "#f3dfb4", "#efc483", "#e6a25c", "#d67d43", "#bb5a35", "#96392b", "#6b1d23")
ON_LIGHT_CELL, ON_DARK_CELL = "#1b1f25", "#fffefe"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", ">", "h", "*")
DASHES: tuple[tuple[float, tuple[float, ...] | None], ...] = (
    (0, None),
    (0, (6, 2)),
    (0, (2, 1.5)),
    (0, (7, 2, 1.5, 2)),
    (0, (4, 1.5, 1.5, 1.5, 1.5, 1.5)),
)  # fmt: skip
BASELINE_MARKER = "*"
VARIABLES = {
    INK: "--chart-ink",
    MUTED: "--chart-muted",
    GRID: "--chart-grid",
    PAPER: "--chart-paper",
    ON_LIGHT_CELL: "--chart-low-text",
    ON_DARK_CELL: "--chart-high-text",
    **{colour: f"--series-{place}" for place, colour in enumerate(SERIES)},
    **{colour: f"--heat-{place}" for place, colour in enumerate(HEAT)},
}


@dataclass(frozen=True)
class Look:
    """How one format is drawn, the same in every chart."""

    colour: str
    marker: str
    dash: tuple[float, tuple[float, ...] | None]


def look(place: int) -> Look:
    """Of the quantized format at a place."""
    markers = MARKERS[:-1]  # the star is the unquantized model's
    return Look(SERIES[place % len(SERIES)], markers[place % len(markers)], DASHES[place % len(DASHES)])


BASELINE_LOOK = Look(INK, BASELINE_MARKER, (0, (1, 2)))
