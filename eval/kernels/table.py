"""Measured cases as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.eval.kernels.peers import PEERS
from quantkit.eval.kernels.results import Measured, Report
from quantkit.eval.kernels.timing import Limits

Table = tuple[str, list[str], list[list[str]]]  # title, columns, rows


def tables(report: Report, *, explain: bool = False) -> list[Table]:
    """One table for linear layers and one for attention, where there are rows for it."""
    found = []
    for what, title in (("linear", "Linear layers"), ("attention", "Attention")):
        rows = [row for row in report.rows if row.case.what == what]
        if not rows:
            continue
        peers = [name for name in PEERS if any(name in row.peers for row in rows)]
        first = (
            ["format", "layer", "M", "us"] if what == "linear" else ["case", "cache", "heads", "us", "TB/s", "TFLOP/s"]
        )
        columns = [*first, "% of limit", "limit", *(f"vs {name}" for name in peers), *["kernel"] * explain]
        cells = [_cells(row, report.limits, peers) + [row.explanation] * explain for row in rows]
        found.append((f"{title}, {rows[0].case.dtype}, on {_machine(report)}", columns, cells))
    return found


def _cells(row: Measured, limits: Limits, peers: Sequence[str]) -> list[str]:
    case, times = row.case, row.times
    linear = case.what == "linear"
    cells = [case.format, case.layer, str(case.tokens)] if linear else [case.layer, case.format, case.shape]
    if times is None:
        cells += ["WRONG"] if linear else ["WRONG", "", ""]
        return [*cells, "", f"error {row.error:.2g}", *[""] * len(peers)]
    cells += [f"{times.median:.4g}"]
    if not linear:
        cells += [f"{amount / times.median / 1e6:.3g}" for amount in (case.bytes, case.operations)]
    cells += [f"{row.percent(limits):.0f}", row.limit(limits)]
    return [*cells, *(_ratio(row.ratio(name)) for name in peers)]


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _machine(report: Report) -> str:
    return "CPU (wall clock)" if report.device == "cpu" else report.device


def footer(report: Report) -> str:
    """How to read the tables, and what went wrong with peers."""
    how = "wall clock, caches warm" if report.device == "cpu" else "CUDA graph replays, caches cold"
    precision = "as 16 bits are multiplied here" if report.device == "cpu" else "in 16 bit"
    limits = report.limits
    lines = [
        f"Median of {report.repeat}, {how}. Limits measured in this run: {limits.bandwidth / 1e12:.3g} TB/s, "
        f"{limits.rate / 1e12:.3g} TFLOP/s {precision} (8-bit products: taken as twice that).",
    ]
    if any(row.peers for row in report.rows):
        lines.append("vs: the peer's time over ours, so above 1 quantkit is faster.")
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])
