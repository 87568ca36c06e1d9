"""report.html: one file that needs nothing else, not even a network. Its policy forbids it to load anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from string import Template

from quantkit.eval.compare.results import Comparison
from quantkit.eval.report import method, sections
from quantkit.eval.report.chart import Chart
from quantkit.eval.report.markup import Markup, join, safe
from quantkit.eval.report.samples import sample_section
from quantkit.eval.report.verdict import Verdict

_HERE = Path(__file__).parent
_STYLE = ("colours", "layout", "tables", "details", "media")  # later ones win


def html_page(comparison: Comparison, verdict: Verdict, charts: Sequence[Chart]) -> str:
    drawn = {chart.name: chart for chart in charts}
    content = join(
        sections.heading(comparison),
        sections.verdict_section(comparison, verdict),
        sections.chart_section(drawn.get("tradeoff")),
        sections.table_section(comparison, verdict),
        sections.chart_section(drawn.get("memory"), drawn.get("speed")),
        sections.chart_section(drawn.get("layers"), drawn.get("linears")),
        sample_section(comparison),
        method.measured_section(comparison),
        method.repeat_section(comparison),
    )
    style = "\n".join((_HERE / "style" / f"{part}.css").read_text(encoding="utf-8") for part in _STYLE)
    script = (_HERE / "sort.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template((_HERE / "template.html").read_text(encoding="utf-8")).substitute(
        title=safe(sections.title(comparison)),
        style=Markup(style),
        content=content,
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )
