"""The rows as pages show them: what each tool makes of the same bits, both calibrations side by side."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.eval.peers.rows import Row

_TITLES = ("bits", "method", "tool", "bits a weight", "default text: perplexity / KL / same first choice", "in-domain")
_HEAD = f"| {' | '.join(_TITLES)} | seconds |\n{'|---' * (len(_TITLES) + 1)}|"


def markdown(rows: Iterable[Row], model: str) -> str:
    """A table of one model, a line for each tool and method, by bits and then by loss."""
    lines: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        if row.model == model:
            lines.setdefault(row.kind[:-1], {})[row.calibration] = row
    ordered = sorted(lines.values(), key=lambda found: (-_any(found).bits, min(row.kl for row in found.values())))
    return "\n".join([_HEAD, *(_line(found) for found in ordered)])


def _any(found: dict[str, Row]) -> Row:
    return next(iter(found.values()))


def _line(found: dict[str, Row]) -> str:
    row = _any(found)
    without = found.get("none")
    cells = [_measured(without or found.get(name)) for name in ("default", "in-domain")]
    steps = f", {row.steps:,} steps" if row.steps else ""
    grouped = "" if row.method in ("nf4", "llm-int8") else f" g{row.group}"
    seconds = " / ".join(f"{one.seconds:,.0f}" for one in found.values())
    parts = (row.bits, f"{row.method}{grouped}{steps}", f"{row.tool} {row.version.split('+')[0]}")
    return "| " + " | ".join(str(part) for part in (*parts, f"{row.bits_per_weight:.2f}", *cells, seconds)) + " |"


def _measured(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.perplexity:.2f} / {row.kl:.4f} / {100 * row.top1_agreement:.1f} %"
