"""Pages say of other projects' quantizers what rows say; the column about the report is the report's."""

import json
import re

import pytest

from pages import PAGES, ROOT
from quantkit.eval.interop.table import BEGIN, END, between_marks
from quantkit.eval.peers.jobs import TOOLS
from quantkit.eval.peers.pages import REPORT, tables
from quantkit.eval.peers.rows import RESULTS, newest, read

ROWS = newest(read(ROOT / RESULTS))
TABLES = tables(ROWS)
# Of kernels: eval/results/kernels.csv.
SPEEDS = (
    "docs/performance/index.md",
    "docs/performance/notebook.md",
    "docs/performance/bench.md",
    "docs/explanations/kernels.md",
)
PAGE = "docs/explanations/quantization.md"
OTHERS = [name for name, tool in TOOLS.items() if tool.script]
_MEASURED = re.compile(r"\d+\.\d+")
_VERSION = re.compile(rf"({'|'.join(map(re.escape, OTHERS))}) \d+(\.\d+)+")


@pytest.mark.parametrize(("page", "mark"), TABLES)
def test_tables_are_those_of_the_rows(page: str, mark: str) -> None:
    """To mend it: python -m quantkit.eval.peers --model smollm2 --table --write"""
    assert between_marks(PAGES[page], mark) == TABLES[page, mark]


def test_both_calibrations_stand_side_by_side() -> None:
    assert {"default", "in-domain", "none"} == {row.calibration for row in ROWS if row.model == "smollm2"}
    assert {row.steps for row in ROWS if row.tool == "auto-round"} == {None, 1000}


def test_what_the_base_is_stands_before_its_first_table() -> None:
    """A decoded 4-bit file is no original."""
    (origin,) = {row.origin for row in ROWS if row.model == "smollm2"}
    assert "decoded from the GGUF file" in origin
    for mark in ("peers", "peers, smollm2"):
        above = " ".join(PAGES[PAGE].partition(BEGIN.format(name=mark))[0].split()[-150:])
        assert "decoded from" in above, mark
        assert "Q4_1" in above, mark


def test_the_column_about_the_report_is_the_reports() -> None:
    lines = [line.split(" | ") for line in TABLES[PAGE, "peers"].splitlines()[2:]]
    said = {line[-1].removesuffix(" |") for line in lines if _MEASURED.match(line[-1])}
    found = [one for one in json.loads(REPORT.read_text())["formats"] if one["name"] not in ("bfloat16", "fp8")]
    assert said == {f"{one['quality']['perplexity']['value']:.2f}" for one in found}
    shown = REPORT.with_suffix(".md").read_text()
    assert all(f"| {number} [" in shown for number in said)
    assert REPORT.with_suffix(".html").relative_to(ROOT).as_posix() in PAGES[PAGE]
    assert REPORT.with_suffix(".md").relative_to(ROOT).as_posix() in PAGES["README.md"]


def unmarked(page: str) -> str:
    """A page without the tables that commands write."""
    text = PAGES[page]
    for begin in re.findall(re.escape(BEGIN).replace(r"\{name\}", "(.+)"), text):
        before, after = text.split(BEGIN.format(name=begin))[0], text.split(END.format(name=begin))[1]
        text = before + after
    return text


@pytest.mark.parametrize("page", [page for page in PAGES if page not in SPEEDS])
def test_no_number_of_another_quantizer_stands_outside_of_these_tables(page: str) -> None:
    """In lines of tables that name one; versions are no measurement."""
    lines = [line for line in unmarked(page).splitlines() if line.startswith("|") and any(o in line for o in OTHERS)]
    assert [line for line in lines if _MEASURED.search(_VERSION.sub("", line))] == []


def test_such_lines_are_found() -> None:
    """A pattern that finds nothing would prove nothing."""
    assert _MEASURED.search(_VERSION.sub("", "| GPTQ | GPTQModel 7.6.0 | 58.7 |"))
    assert not _MEASURED.search(_VERSION.sub("", "| GPTQ | GPTQModel 7.6.0 | |"))
    tables = sum(len(table) for (page, _), table in TABLES.items() if page == PAGE)
    assert len(unmarked(PAGE)) < len(PAGES[PAGE]) - tables
