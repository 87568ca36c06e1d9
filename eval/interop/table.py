"""The page's table: checkpoints down, engines across, and why some did not load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.engines import Layers, layout_of, verdicts
from quantkit.errors import StorageError
from quantkit.eval.interop import rows
from quantkit.eval.interop.checkpoints import all_tried
from quantkit.formats import build
from quantkit.formats.engine_rules import OTHERS, PROJECTS
from quantkit.recipe import list_recipes

PAGE = Path("docs") / "reference" / "interop.md"
ENGINES = ("transformers", "vLLM", "SGLang", "llama.cpp")
BEGIN, END = "<!-- {name}: written by a command, see above -->", "<!-- end of {name} -->"
DENSE, EXPERTS = "demo", "demo-experts"  # the bundled models
Row = dict[str, str]


def load_tables(known: list[Row]) -> dict[str, str]:
    """By the names of their marks."""
    tried = [tried.name for tried in all_tried()]
    tables = {"interop": load_table(known, DENSE, tried), "interop with experts": load_table(known, EXPERTS)}
    return tables | {"verdicts": verdict_table(), "sources": source_table()}


def verdict_table() -> str:
    """What the rules say about each layout that recipes write, without what is seen in a model."""
    layouts: dict[str, Sequence[str]] = {}
    for recipe in list_recipes():
        fmt = build(recipe.format.name, recipe.format.options, "bfloat16")
        layers = Layers({"layer": fmt})
        layouts[layout_of(layers)] = [verdict.answer for verdict in verdicts(layers)[1:]]
    return markdown_table(("layout", *OTHERS), [(layout, *layouts[layout]) for layout in sorted(layouts)])


def source_table() -> str:
    """What was read for the rules and the launch commands, and in which state."""
    lines = [
        (engine, project.repository, f"`{path}`", read.version, read.date)
        for engine, project in PROJECTS.items()
        for path, read in project.read.items()
    ]
    return markdown_table(("engine", "project", "source", "release or commit", "read"), lines)


def load_table(known: list[Row], model: str, tried: Sequence[str] = ()) -> str:
    """Every checkpoint that is tried or has a row, the newest row of each engine; then the reasons of refusals."""
    newest = rows.newest(known, model)
    names = list(dict.fromkeys([*tried, *(row["checkpoint"] for row in newest.values())]))
    layouts = {row["checkpoint"]: row["layout"] for row in newest.values()}
    lines = [
        (name, layouts.get(name, ""), *(_cell(newest.get((engine, name))) for engine in ENGINES)) for name in names
    ]
    refused = [row for row in newest.values() if row["loads"] != "yes"]
    text = markdown_table(("checkpoint", "layout", *ENGINES), lines)
    if refused:
        reasons = [(row["checkpoint"], f"{row['engine']} {row['version']}", f"`{row['reason']}`") for row in refused]
        text += "\n\n" + markdown_table(("does not load", "in", "it says"), reasons)
    return text


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["loads"] != "yes":
        return f"{row['loads']} ({row['version']}, {row['date']})"
    there, here = (f"{float(row[f'perplexity_{side}']):.3f}" for side in ("there", "here"))
    return f"{there} / {here} ({row['version']}, {row['dtype_there']}, {row['date']})"


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rules = ["---"] * len(columns)
    cleaned = [[cell.replace("|", "\\|") for cell in line] for line in (columns, rules, *lines)]
    return "\n".join("".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in cleaned)


def between_marks(page: str, name: str) -> str:
    """What stands on a page between the marks of a table."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    if page.count(begin) != 1 or page.count(end) != 1:
        raise StorageError(f"the page must have '{begin}' and '{end}' once each")
    return page.partition(begin)[2].partition(end)[0].strip()


def with_table(page: str, name: str, table: str) -> str:
    """The page with another table between its marks."""
    between_marks(page, name)
    before, begin, rest = page.partition(BEGIN.format(name=name))
    end = END.format(name=name)
    return f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
