"""What commands share: the --json option, tables, progress bars that stay quiet when nobody watches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from quantkit.progress import Progress

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace the output folder if it is a checkpoint.")
output_option = click.option("-o", "--output", required=True, metavar="DIR", help="Folder to create.")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], footer: str = "") -> None:
    """A table for people. The first column is text, the others are aligned to the right where they hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for index, column in enumerate(columns):
        numeric = index > 0 and all(isinstance(row[index], int | float) or _numeric(str(row[index])) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a pipe or a file has no width: one row is one line there
    console.print(table)
    if footer:
        console.print(footer, highlight=False)


def _numeric(text: str) -> bool:
    return text.lstrip("+-")[:1].isdigit() or text in ("", "-")


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """Gives a function to call after each finished item; shows a bar on stderr only when stderr is a terminal."""
    console = Console(stderr=True)
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("[dim]{task.fields[item]}"),
    )
    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None, item="")

        def advance(item: str, total: int) -> None:
            progress.update(task, advance=1, total=total, item=item)

        yield advance


def human_bytes(count: float) -> str:
    """1234567 -> '1.23 MB' (decimal units, as disks and model cards count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
