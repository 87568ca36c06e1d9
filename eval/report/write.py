"""Writes a comparison as a report: a page, its numbers, the same as text, and pictures of the charts."""

from __future__ import annotations

import json
from pathlib import Path

from quantkit.eval.compare.results import Comparison
from quantkit.eval.report.markdown import markdown
from quantkit.eval.report.page import html_page
from quantkit.eval.report.verdict import judge
from quantkit.storage import replacing, storage_errors

PAGE, NUMBERS, TEXT = "report.html", "report.json", "report.md"


def write_report(comparison: Comparison, folder: Path) -> Path:
    """report.html, report.json, report.md and PNGs into `folder`; gives the path of the page, which is written last."""
    from quantkit.eval.report.charts import draw_charts  # matplotlib: a second that only a report should cost

    verdict, charts = judge(comparison), draw_charts(comparison)
    numbers = json.dumps(comparison.to_dict() | {"verdict": verdict.to_dict()}, indent=1)
    files = {chart.file: chart.png for chart in charts}
    files |= {NUMBERS: f"{numbers}\n".encode(), TEXT: markdown(comparison, verdict, charts).encode()}
    files |= {PAGE: html_page(comparison, verdict, charts).encode()}
    with storage_errors(folder / PAGE):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            with replacing(folder / name) as partial:
                partial.write_bytes(content)
    return folder / PAGE
