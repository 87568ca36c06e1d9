"""The rows as pages show them: what each tool makes of the same bits, both calibrations side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from quantkit.eval.interop.table import markdown_table
from quantkit.eval.peers.jobs import Job
from quantkit.eval.peers.rows import Row

_TITLES = (
    "bits",
    "method",
    "tool",
    "bits per weight",
    "default text: perplexity / KL / same first choice",
    "in-domain",
)
_SHORT = ("bits", "method", "tool", "default text", "in-domain", "in the report")
Line = dict[str, Row]  # by calibration


def markdown(rows: Iterable[Row], model: str) -> str:
    """Everything about one model, a line for each tool and method, by bits and then by loss."""
    return markdown_table((*_TITLES, "seconds"), [_whole(line) for line in _lines(rows, model)])


def summary(rows: Iterable[Row], model: str, report: Path) -> str:
    """Perplexity and KL alone, beside what the model's report says of the same recipes (`report.json`)."""
    found = json.loads(report.read_text(encoding="utf-8"))["formats"]
    reported = {one["name"]: one["quality"]["perplexity"]["value"] for one in found if one.get("quality")}
    return markdown_table(_SHORT, [_brief(line, reported) for line in _lines(rows, model)])


def _lines(rows: Iterable[Row], model: str) -> list[Line]:
    lines: dict[tuple[object, ...], Line] = {}
    for row in rows:
        if row.model == model:
            lines.setdefault(row.kind[:-1], {})[row.calibration] = row
    return sorted(lines.values(), key=lambda line: (-_any(line).bits, min(row.kl for row in line.values())))


def _any(line: Line) -> Row:
    return next(iter(line.values()))


def _names(line: Line) -> list[str]:
    row = _any(line)
    steps = f", {row.steps:,} steps" if row.steps else ""
    grouped = "" if row.method in ("nf4", "llm-int8") else f" g{row.group}"
    return [str(row.bits), f"{row.method}{grouped}{steps}", f"{row.tool} {row.version.split('+')[0]}"]


def _calibrated(line: Line) -> list[Row | None]:
    return [line.get("none") or line.get(name) for name in ("default", "in-domain")]


def _whole(line: Line) -> Sequence[str]:
    cells = [
        "" if row is None else f"{row.perplexity:.2f} / {row.kl:.4f} / {100 * row.top1_agreement:.1f} %"
        for row in _calibrated(line)
    ]
    seconds = " / ".join(f"{row.seconds:,.0f}" for row in line.values())
    return (*_names(line), f"{_any(line).bits_per_weight:.2f}", *cells, seconds)


def _brief(line: Line, reported: dict[str, float]) -> Sequence[str]:
    row = _any(line)
    recipe = Job(row.tool, row.method, row.bits).recipe(row.group) if row.tool == "quantkit" else ""
    cells = ["" if one is None else f"{one.perplexity:.2f} / {one.kl:.4f}" for one in _calibrated(line)]
    return (*_names(line), *cells, f"{reported[recipe]:.2f}" if recipe in reported else "")
