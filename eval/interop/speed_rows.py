"""eval/results/side_by_side.csv: what each engine did with a load, and the table that sets them against each other."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.eval.engine import csv_file
from quantkit.eval.engine.run import Load
from quantkit.eval.interop import rows
from quantkit.eval.interop.table import markdown_table

FILE = Path("eval") / "results" / "side_by_side.csv"
COLUMNS = (
    *("date", "machine", "engine", "version", "model", "format", "protocol", "requests", "prompt", "new"),
    *("tokens_per_second", "seconds", "start_seconds", "first_token_ms", "gap_ms", "command"),
)
OFFLINE, SERVED = "offline", "served"  # protocols: requests handed over in the process; over HTTP
OURS = "quantkit"
LOADS = (Load(1, 128, 256), Load(8, 128, 256), Load(32, 128, 256), Load(256, 512, 256), Load(16, 2048, 1))
Row = dict[str, str]


@dataclass(frozen=True)
class Timed:
    """One load at one engine."""

    load: Load
    seconds: float  # from the first request to the last token
    start_seconds: float | None  # from the start of the process to its first token
    tokens_per_second: float
    first_token_ms: float | None = None
    gap_ms: float | None = None

    @classmethod
    def offline(cls, load: Load, seconds: float, start: float | None) -> Timed:
        return cls(load, seconds, start, counted_tokens(load) / seconds)


def counted_tokens(load: Load) -> int:
    """New ones; of a load that answers with a single token, those of its prompts."""
    return load.batch * (load.prompt if load.new == 1 else load.new)


def parse_loads(text: str) -> tuple[Load, ...]:
    """From `8x128+256,16x2048+1`."""
    found = []
    for part in text.split(","):
        try:
            batch, _, rest = part.partition("x")
            prompt, _, new = rest.partition("+")
            load = Load(int(batch), int(prompt), int(new))
        except ValueError:
            load = Load(0, 0, 0)
        if min(load.batch, load.prompt, load.new) < 1:
            raise InputError(f"a load is '{part}', but must be requests, prompt and new tokens, such as 8x128+256")
        found.append(load)
    return tuple(found)


def load_name(load: Load) -> str:
    """As `parse_loads` takes it."""
    return f"{load.batch}x{load.prompt}+{load.new}"


def longest(loads: Iterable[Load]) -> int:
    """Tokens of a prompt with its answer; warm-ups answer with two."""
    return max(load.prompt + max(load.new, 2) for load in loads)


def append(path: Path, timed: Timed, **known: str) -> None:
    """`known`: engine, version, model, format, protocol and command."""
    load = timed.load
    row: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": rows.machine(),
        **known,
        "requests": load.batch,
        "prompt": load.prompt,
        "new": load.new,
        "tokens_per_second": round(timed.tokens_per_second, 1),
        "seconds": round(timed.seconds, 3),
        "start_seconds": _rounded(timed.start_seconds),
        "first_token_ms": _rounded(timed.first_token_ms),
        "gap_ms": _rounded(timed.gap_ms),
    }
    csv_file.append(path, COLUMNS, row)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def read(path: Path) -> list[Row]:
    return rows.read(path)


def done(known: list[Row], **wanted: str) -> set[Load]:
    """Loads that an engine of this version has rows of today, on this machine."""
    today = wanted | {"date": datetime.date.today().isoformat(), "machine": rows.machine()}
    return {_load(row) for row in known if all(row[name] == value for name, value in today.items())}


def _load(row: Row) -> Load:
    return Load(int(row["requests"]), int(row["prompt"]), int(row["new"]))


def speed_table(known: list[Row]) -> str:
    """Tokens per second, ours / theirs, of the newest rows; nothing where both have not run on one day."""
    newest = {(*_place(row), row["engine"]): row for row in known}
    others = list(dict.fromkeys(row["engine"] for row in known if row["engine"] != OURS))
    lines = []
    for place in dict.fromkeys(_place(row) for row in known):
        ours = newest.get((*place, OURS))
        for other in others:
            theirs = newest.get((*place, other))
            if ours and theirs and ours["date"] == theirs["date"]:
                lines.append(_line(ours, theirs))
    if not lines:
        return "Not run yet."
    columns = ("model", "format", "load", "quantkit", "other", "ratio", "machine", "date")
    return markdown_table(columns, lines)


def _place(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("machine", "model", "format", "protocol", "requests", "prompt", "new"))


def _line(ours: Row, theirs: Row) -> tuple[str, ...]:
    speeds = [float(row["tokens_per_second"]) for row in (ours, theirs)]
    load = _load(ours)
    what = (
        f"prompts {load.batch} x {load.prompt:,}" if load.new == 1 else f"{load.batch} x ({load.prompt} + {load.new})"
    )
    if ours["protocol"] == SERVED:
        what += " over HTTP"
    return (
        ours["model"],
        ours["format"],
        what,
        f"{speeds[0]:,.0f}",
        f"{speeds[1]:,.0f} ({theirs['engine']} {theirs['version']})",
        f"{speeds[0] / speeds[1]:.2f}",
        ours["machine"],
        ours["date"],
    )
