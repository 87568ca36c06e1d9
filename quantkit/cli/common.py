"""What commands share: the --json and --device options, tables, progress bars that stay quiet when nobody watches."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from quantkit.defaults import DEVICE
from quantkit.devices import NAMES
from quantkit.progress import Progress
from quantkit.wording import human_bytes, model_name

if TYPE_CHECKING:
    from quantkit.provenance import Provenance

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace the output folder if it is a checkpoint.")
output_option = click.option("-o", "--output", required=True, metavar="PATH", help="Folder to create; for GGUF a file.")


def _make_current(context: click.Context, option: click.Parameter, name: str) -> str:
    """Refuses a device that is not here, and makes a GPU that is named current until the command ends."""
    if name not in ("auto", "cpu") and not context.resilient_parsing:
        from quantkit.devices import on_device, resolve_device

        context.with_resource(on_device(resolve_device(name)))
    return name


device_option = click.option(
    "--device",
    default=DEVICE,
    show_default=True,
    callback=_make_current,
    help=f"{NAMES}; auto: a GPU where there is one.",
)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_provenance(model: str, base: str | None, provenance: Provenance) -> None:
    """Under the numbers that it belongs to."""
    click.echo(f"calibration of {model_name(model)}: {provenance.calibration}")
    click.echo(f"{'base model' if base else 'origin of'} {model_name(base or model)}: {provenance.origin}")


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
def progress_bar(label: str, memory_of: str | None = None) -> Iterator[Progress]:
    """Gives a function to call after each finished item; shows a bar on stderr only when stderr is a terminal.

    `memory_of` is a device whose memory in use should be shown.
    """
    console = Console(stderr=True)
    columns: list[bars.ProgressColumn] = [
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[speed]}"),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[memory]}"),
        bars.TextColumn("[dim]{task.fields[item]}"),
    ]
    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None, item="", speed="", memory="")

        def advance(item: str, total: int) -> None:
            speed = progress.tasks[0].speed
            shown = f"{speed:.1f}/s" if speed else ""
            progress.update(task, advance=1, total=total, item=item, speed=shown, memory=_memory(memory_of))

        yield advance


def _memory(device: str | None) -> str:
    """Memory in use by this process, on the device where it is a GPU."""
    if device is None:
        return ""
    if device.startswith("cuda"):
        import torch

        return human_bytes(torch.cuda.memory_allocated(device))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return ""
    return human_bytes(pages * os.sysconf("SC_PAGE_SIZE"))
