"""report.md: the report as text, to paste into an issue."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quantkit.eval.advice.from_rows import lines
from quantkit.eval.compare.results import Comparison
from quantkit.eval.report import method, sections
from quantkit.eval.report.chart import Chart
from quantkit.eval.report.markup import readable
from quantkit.eval.report.rules import rules
from quantkit.eval.report.sources import source_lines
from quantkit.eval.report.tables import Column, Row, Table, main_table
from quantkit.eval.report.verdict import Verdict

_MEANS_SOMETHING = re.compile(r"([\\`*\[\]<>|&#~$]|(?<!\w)_|_(?!\w))")


def markdown(comparison: Comparison, verdict: Verdict, charts: Sequence[Chart]) -> str:
    first, second = verdict.sentences
    machine = f"{comparison.machine.device} ({'GPU' if comparison.machine.gpu else 'CPU'})"
    parts = [
        f"# {plain(sections.title(comparison))}",
        f"{plain(comparison.family)}, {comparison.parameters:,} parameters, measured on {plain(machine)}, "
        f"{plain(comparison.date)}.",
        f"**{plain(first)}**",
        plain(second),
        _list([f"For {name}: {rest}" for name, rest in lines(verdict.advice)]),
        *(f"> {plain(note)}" for note in comparison.notes),
        *(f"![{chart.title}]({chart.file})\n\n{plain(chart.caption)}" for chart in charts[:1]),
        "## All formats",
        _table(main_table(comparison)),
        "Brackets are 95 % confidence intervals.",
        _list([f"{what}: {text}" for what, text in source_lines(comparison)]),
        *_failures(comparison),
        *(f"![{chart.title}]({chart.file})\n\n{plain(chart.caption)}" for chart in charts[1:]),
        "## How it was measured",
        _list([*method.quality_words(comparison), *method.speed_words(comparison), *rules()]),
        *(f"### {plain(table.title)}\n\n{_table(table)}" for table in method.detail_tables(comparison)),
        "## Do it again",
        fenced(comparison.command),
        _list([f"{name}: {text}" for name, text in method.setup(comparison)]),
        "Each format by hand, in the folder where that command was run:"
        if any(found.commands for found in comparison.formats)
        else "",
        *(
            f"{plain(found.name)}:\n\n{fenced(chr(10).join(found.commands))}"
            for found in comparison.formats
            if found.commands
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: str) -> str:
    """On one line, with nothing that Markdown or HTML would read as its own."""
    return _MEANS_SOMETHING.sub(r"\\\1", " ".join(readable(text).split()))


def fenced(text: str) -> str:
    """A block of code, with a fence that the text does not have."""
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{readable(text)}\n{fence}"


def _failures(comparison: Comparison) -> list[str]:
    failed = [(found.name, found.error) for found in comparison.formats if found.error is not None]
    return [f"{plain(name)} failed: {plain(error)}" for name, error in failed]


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {plain(line)}" for line in lines)


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    heads = [table.first, *(_head(column) for column in table.columns)]
    lines = [heads, ["---", *["---:"] * len(table.columns)], *(_row(row) for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _head(column: Column) -> str:
    return plain(f"tokens/s, {column.title} at once" if column.group.startswith("tokens/s") else _visible(column.title))


def _row(row: Row) -> list[str]:
    name = f"{row.name} (failed)" if row.error is not None else row.name
    return [plain(name), *(f"{plain(cell.text)} {cell.detail}".rstrip() for cell in row.cells)]


def _visible(text: str) -> str:
    return text.replace("\u200b", "")
