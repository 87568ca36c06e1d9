"""docs/reference/interop.md shows what the rows say; numbers of other engines have rows, or say whose they are."""

import re

import pytest

from pages import PAGES, ROOT
from quantkit.eval.interop import rows, speed_rows
from quantkit.eval.interop.checkpoints import all_tried
from quantkit.eval.interop.table import ENGINES, PAGE, between_marks, load_tables

_THEIRS = re.compile(r"^\| (?P<engine>vLLM|SGLang|llama\.cpp) (?P<version>\d[\w.]*)(?P<rest>.*)$", re.MULTILINE)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
ELSEWHERE = "measured elsewhere"
THEIRS = [
    (page, found["engine"], found["version"], found["rest"])
    for page, text in PAGES.items()
    if page != PAGE.as_posix()
    for found in _THEIRS.finditer(text)
]


def speeds(engine: str, version: str) -> set[str]:
    """As pages round them."""
    known = speed_rows.read(ROOT / speed_rows.FILE)
    same = [row for row in known if (row["engine"], row["version"]) == (engine, version)]
    return {f"{float(row['tokens_per_second']):,.0f}" for row in same}


@pytest.mark.parametrize(
    ("name", "table"),
    [
        *load_tables(rows.read(ROOT / rows.FILE)).items(),
        ("side by side", speed_rows.speed_table(speed_rows.read(ROOT / speed_rows.FILE))),
    ],
)
def test_tables_are_those_of_the_rows(name: str, table: str) -> None:
    """To mend it: python -m quantkit.eval.interop table --write"""
    assert between_marks(PAGES[PAGE.as_posix()], name) == table


def test_the_table_names_everything_that_is_tried() -> None:
    table = between_marks(PAGES[PAGE.as_posix()], "interop").splitlines()
    assert table[0] == f"| checkpoint | layout | {' | '.join(ENGINES)} |"
    assert {line.split(" | ")[0][2:] for line in table} >= {tried.name for tried in all_tried()}


def test_rows_say_how_they_were_made() -> None:
    always = ("date", "machine", "engine", "version", "packages", "checkpoint", "layout", "model", "windows", "command")
    where = {"yes": ("dtype_there", "dtype_here", "perplexity_there", "perplexity_here"), "no": ("reason",)}
    for row in rows.read(ROOT / rows.FILE):
        needed = (*always, *(where | {"unknown": ("reason",)})[row["loads"]])
        assert all(row[name] for name in needed), row


@pytest.mark.parametrize(("page", "engine", "version", "rest"), THEIRS)
def test_numbers_of_other_engines_have_rows(page: str, engine: str, version: str, rest: str) -> None:
    """Lines of tables that begin with an engine and its version; what was not measured here must say so."""
    have = speeds(engine, version)
    if not have:
        assert ELSEWHERE in " ".join(PAGES[page].split()), f"{page}: no rows of {engine} {version}"
        return
    label, *cells = rest.split("|")
    if ELSEWHERE in label:
        return
    numbers = [number for cell in cells for number in _NUMBER.findall(cell)]
    assert set(numbers) <= have, f"{page}: {label.strip()}"


def test_such_lines_are_found() -> None:
    """A pattern that finds nothing would prove nothing."""
    assert _THEIRS.search("| vLLM 0.26.0, AWQ | 251 / 203 | 1,920 |")
    assert _NUMBER.findall(" 251 / 1,920.5 ") == ["251", "1,920.5"]
