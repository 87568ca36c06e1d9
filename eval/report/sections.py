"""The upper part of the page: title, verdict, charts, table."""

from __future__ import annotations

import re
from itertools import groupby

from quantkit.eval.advice.from_rows import lines
from quantkit.eval.compare.results import Comparison
from quantkit.eval.report.chart import Chart
from quantkit.eval.report.markup import Markup, join, tag
from quantkit.eval.report.rules import BEST, FASTEST, SMALLEST, Pick
from quantkit.eval.report.sentences import figure, listed, need_words
from quantkit.eval.report.sources import source_lines
from quantkit.eval.report.tables import Row, Table, main_table
from quantkit.eval.report.verdict import Verdict
from quantkit.wording import human_count


def title(comparison: Comparison) -> str:
    return f"Which format for {comparison.model}?"


def heading(comparison: Comparison) -> Markup:
    kind = "GPU" if comparison.machine.gpu else "CPU"
    facts = (
        f"{comparison.family}, {human_count(comparison.parameters)} parameters",
        f"measured on {comparison.machine.device} ({kind})",
        comparison.date,
        f"{len(comparison.formats)} formats",
    )
    name = tag("h1", "Which format for ", tag("b", f"{comparison.model}?", class_="name"))
    return tag("header", name, tag("p", " · ".join(facts), class_="facts"))


def verdict_section(comparison: Comparison, verdict: Verdict) -> Markup:
    first, second = verdict.sentences
    picks = [_pick(comparison, verdict, pick) for pick in verdict.picks if pick.format is not None]
    return tag(
        "section",
        tag("h2", "The verdict"),
        tag("p", *_with_names(first, comparison), class_="first"),
        tag("p", *_with_names(second, comparison), class_="second"),
        tag("ul", *picks, class_="picks") if picks else None,
        _advice(verdict),
        *(tag("p", note, class_="notes") for note in comparison.notes),
        class_="verdict",
    )


def _advice(verdict: Verdict) -> Markup | None:
    """As `quantkit advise` gives it, by the rows of this comparison."""
    if not verdict.advice:
        return None
    terms = [tag("div", tag("dt", name), tag("dd", rest)) for name, rest in lines(verdict.advice)]
    return tag("dl", *terms, class_="meanings advice")


def _with_names(sentence: str, comparison: Comparison) -> list[Markup | str]:
    """The sentence with the names of formats set off, so that none is torn at the end of a line."""
    names = sorted((re.escape(found.name) for found in comparison.formats), key=len, reverse=True)
    if not names:
        return [sentence]
    sentence = sentence.replace(" %", "\u00a0%").replace("× ", "×\u00a0")  # noqa: RUF001
    parts = re.split(rf"(?<![\w-])({'|'.join(names)})(?![\w-])", sentence)
    return [tag("b", part, class_="name") if place % 2 else part for place, part in enumerate(parts)]


def _pick(comparison: Comparison, verdict: Verdict, pick: Pick) -> Markup:
    words = need_words(pick.need, verdict)
    same = {SMALLEST: "as small", FASTEST: "as fast, within doubt", BEST: "as close, within doubt"}[pick.need]
    tie = f"{same}: {listed(pick.ties)}" if pick.ties else None
    return tag(
        "li",
        tag("span", words[:1].upper() + words[1:], class_="need"),
        tag("span", pick.format, class_="name"),
        tag("span", figure(comparison, verdict, pick)),
        tag("span", tie, class_="tie") if tie else None,
    )


def chart_section(*charts: Chart | None) -> Markup | None:
    drawn = [chart for chart in charts if chart is not None]
    if not drawn:
        return None
    narrow = len(drawn) > 1 and all(len(chart.panels) == 1 and not chart.wide for chart in drawn)
    return tag("section", *(_chart(chart) for chart in drawn), class_="pair" if narrow else None)


def _chart(chart: Chart) -> Markup:
    """Panels are as wide as a phone; wider drawings scroll by themselves."""
    panels = []
    for drawn in chart.panels:
        inner = tag("div", Markup(drawn), class_="scroll", tabindex=0, role="group", aria_label=chart.title)
        panels.append(tag("div", inner if chart.wide else Markup(drawn), class_="panel"))
    return tag(
        "figure",
        tag("h2", chart.title),
        tag("figcaption", chart.caption),
        tag("div", *panels, class_="panels"),
        class_="wide" if chart.wide else None,
    )


def table_section(comparison: Comparison, verdict: Verdict) -> Markup:
    table, sources = main_table(comparison), source_lines(comparison)
    tags = {need: verdict.pick(need).format for need in (SMALLEST, FASTEST, BEST)}
    meanings = {column.meaning: _column_words(column.group, column.title) for column in table.columns}
    terms = [tag("div", tag("dt", name), tag("dd", meaning)) for meaning, name in meanings.items() if meaning]
    lead = "In brackets: 95 % confidence intervals. " if any(found.quality for found in comparison.formats) else ""
    hint = tag("span", "Press a column's name to sort by it.", class_="scripted", hidden="hidden")
    return tag(
        "section",
        tag("h2", table.title),
        tag("p", lead, hint, class_="lead"),
        html_table(table, tags, sortable=True),
        tag("dl", *terms, class_="meanings") if terms else None,
        tag("ul", *(tag("li", f"{what}: {text}") for what, text in sources), class_="sources") if sources else None,
    )


def _column_words(group: str, name: str) -> str:
    return group if group.startswith("tokens/s") else name.replace("\u200b", "")


def html_table(table: Table, tags: dict[str, str | None] | None = None, sortable: bool = False) -> Markup:
    rows = [row for found in table.rows for row in _rows(found, tags or {}, len(table.columns))]
    whole = tag("table", _head(table), tag("tbody", *rows), class_="sortable" if sortable else None)
    return tag("div", whole, class_="table scroll", tabindex=0, role="region", aria_label=table.title)


def _head(table: Table) -> Markup:
    names = [
        tag("th", column.title, scope="col", title=column.meaning or None, data_column=place + 1)
        for place, column in enumerate(table.columns)
    ]
    corner = tag("th", table.first, scope="col", class_="corner", data_column=0)
    if not any(column.group for column in table.columns):
        return tag("thead", tag("tr", corner, *names))
    groups = [tag("th", class_="corner")]
    for group, members in groupby(table.columns, key=lambda column: column.group):
        span = len(list(members))
        groups.append(
            tag("th", tag("span", group), scope="colgroup", colspan=span, class_="group")
            if group
            else tag("td", colspan=span)
        )
    return tag("thead", tag("tr", *groups), tag("tr", corner, *names))


def _rows(row: Row, tags: dict[str, str | None], columns: int) -> list[Markup]:
    """One row, and for a format that failed a second one that says why."""
    marks = [tag("span", need, class_="tag") for need, name in tags.items() if name == row.name]
    detail = f"{row.detail}, unquantized" if row.baseline and row.detail else row.detail
    name = tag("th", row.name, tag("small", detail) if detail else None, *marks, scope="row")
    cells = [
        tag("td", cell.text, tag("small", cell.detail) if cell.detail else None,
            data_order=None if cell.order is None else repr(cell.order))
        for cell in row.cells
    ]  # fmt: skip
    found = [tag("tr", name, *cells)]
    if row.error is not None:
        reason = tag("td", tag("div", f"Failed: {row.error}"), colspan=max(1, columns), class_="error")
        found.append(tag("tr", tag("th", join(), scope="row"), reason, class_="reason"))
    return found
