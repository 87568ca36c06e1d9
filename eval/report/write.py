"""Writes a comparison as a report: a page, its numbers, the same as text, and pictures of the charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantkit.eval.compare.results import Comparison
from quantkit.eval.report.frontier import frontier
from quantkit.eval.report.markdown import markdown
from quantkit.eval.report.page import html_page
from quantkit.eval.report.verdict import Verdict, judge
from quantkit.storage import replacing, storage_errors

PAGE, NUMBERS, TEXT = "report.html", "report.json", "report.md"


def report_numbers(comparison: Comparison, verdict: Verdict) -> dict[str, Any]:
    """What report.json holds, and `--json` prints: all results, whether each is on the frontier, and the verdict."""
    numbers, kept = comparison.to_dict(), frontier(comparison)
    formats = [found | {"frontier": found["name"] in kept} for found in numbers["formats"]]
    return numbers | {"formats": formats, "verdict": verdict.to_dict()}


def write_report(comparison: Comparison, folder: Path) -> Path:
    """report.html, report.json, report.md and PNGs into `folder`; gives the path of the page, which is written last."""
    from quantkit.eval.report.charts import draw_charts  # matplotlib: a second that only a report should cost

    verdict, charts = judge(comparison), draw_charts(comparison)
    numbers = json.dumps(report_numbers(comparison, verdict), indent=1)
    files = {chart.file: chart.png for chart in charts}
    files |= {NUMBERS: f"{numbers}\n".encode(), TEXT: markdown(comparison, verdict, charts).encode()}
    files |= {PAGE: html_page(comparison, verdict, charts).encode()}
    with storage_errors(folder / PAGE):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            with replacing(folder / name) as partial:
                partial.write_bytes(content)
    return folder / PAGE
