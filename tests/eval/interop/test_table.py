"""Rows of interop.csv as a table on a page."""

from pathlib import Path

import pytest

from quantkit.errors import StorageError
from quantkit.eval.interop import rows
from quantkit.eval.interop.compare import Seen
from quantkit.eval.interop.table import BEGIN, END, between_marks, load_table, load_tables, markdown_table, with_table

YES = Seen(True, dtype_there="bfloat16", dtype_here="bfloat16", perplexity_there=16.5,
           perplexity_here=16.4567, difference=0.01)  # fmt: skip
KNOWN = {"engine": "vLLM", "version": "0.26.0", "layout": "gptq W4 g128 sym", "model": "demo", "windows": "4 x 256"}
KNOWN |= {"packages": "torch 2", "command": "python", "checkpoint": "gptq-w4g128"}


def write(path: Path, seen: Seen, **changes: str) -> None:
    rows.append(path, rows.row_of(seen, **(KNOWN | changes)))


def cells(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_newest_row_counts(tmp_path: Path) -> None:
    file = tmp_path / "interop.csv"
    write(file, Seen(False, "ValueError: no | kernel"))
    write(file, YES)
    write(file, Seen(False, "ValueError: no | kernel"), checkpoint="nf4", layout="bitsandbytes NF4")
    known = rows.read(file)
    assert len(known) == 3
    table, day = load_table(known, "demo", ["fp8"]), known[0]["date"]
    assert cells(table, "gptq-w4g128") == [
        "gptq-w4g128", "gptq W4 g128 sym", "", f"16.500 / 16.457 (0.26.0, bfloat16, {day})", "", ""
    ]  # fmt: skip
    assert f"| nf4 | bitsandbytes NF4 | | no (0.26.0, {day}) | | |" in table
    assert "| nf4 | vLLM 0.26.0 | `ValueError: no \\| kernel` |" in table
    assert cells(table, "fp8") == ["fp8", "", "", "", "", ""]


def test_models_have_tables_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "interop.csv"
    write(file, YES)
    write(file, Seen(False, "no experts"), model="demo-experts")
    tables = load_tables(rows.read(file))
    assert cells(tables["interop"], "gptq-w4g128")[3].startswith("16.500")
    assert tables["interop with experts"].splitlines()[2].startswith("| gptq-w4g128 | gptq W4 g128 sym | | no (")
    assert len(cells(tables["interop"], "fp8")) == 6


def test_rows_of_an_older_day_do_not_hide_newer_ones(tmp_path: Path) -> None:
    file = tmp_path / "interop.csv"
    write(file, YES, date="2026-11-20")
    write(file, YES, date="2026-11-02")  # from another machine, put behind the others
    assert rows.newest(rows.read(file), "demo")["vLLM", "gptq-w4g128"]["date"] == "2026-11-20"


def test_a_table_is_put_between_its_marks() -> None:
    page = f"before\n{BEGIN.format(name='x')}\nold\n{END.format(name='x')}\nafter\n"
    changed = with_table(page, "x", markdown_table(("a", "b"), [("1", "")]))
    assert between_marks(changed, "x") == "| a | b |\n| --- | --- |\n| 1 | |"
    assert changed.startswith("before\n")
    assert changed.endswith("\nafter\n")
    assert with_table(changed, "x", "old") == page.replace("\nold\n", "\n\nold\n\n")
    with pytest.raises(StorageError, match="once each"):
        with_table("no marks", "x", "")
