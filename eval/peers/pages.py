"""Where the tables stand: docs/explanations/quantization.md has a summary, and all rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.eval.interop.table import with_table
from quantkit.eval.peers.rows import Row
from quantkit.eval.peers.table import markdown, summary

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "eval/results/compare/smollm2-135m/report.json"  # the one that the page links
_PAGE = "docs/explanations/quantization.md"


def tables(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    """By page and mark; a model without rows has no table."""
    found = {(_PAGE, f"peers, {model}"): markdown(rows, model) for model in ("smollm2", "demo")}
    found[_PAGE, "peers"] = summary(rows, "smollm2", REPORT)
    return {place: table for place, table in found.items() if table.count("\n") > 1}


def write_pages(rows: Sequence[Row]) -> None:
    for (page, mark), table in tables(rows).items():
        file = ROOT / page
        file.write_text(with_table(file.read_text(encoding="utf-8"), mark, table), encoding="utf-8")
