"""eval/results/interop.csv: one row for each time that an engine was given a checkpoint."""

from __future__ import annotations

import csv
import datetime
import platform
from pathlib import Path
from typing import Any

import torch

from quantkit.eval.engine import csv_file
from quantkit.eval.interop.compare import Seen

FILE = Path("eval") / "results" / "interop.csv"
COLUMNS = (
    *("date", "machine", "engine", "version", "packages", "checkpoint", "layout", "model"),
    *("loads", "reason", "windows", "dtype_there", "dtype_here"),
    *("perplexity_there", "perplexity_here", "mean_abs_logprob_difference", "command"),
)


def machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}"


def row_of(seen: Seen, **known: str) -> dict[str, Any]:
    """`known`: the columns that do not depend on what was seen."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        **known,
        "loads": {True: "yes", False: "no", None: "unknown"}[seen.loads],
        "reason": seen.reason,
        "dtype_there": seen.dtype_there,
        "dtype_here": seen.dtype_here,
        "perplexity_there": seen.perplexity_there,
        "perplexity_here": seen.perplexity_here,
        "mean_abs_logprob_difference": seen.difference,
    }


def append(path: Path, row: dict[str, Any]) -> None:
    csv_file.append(path, COLUMNS, row)


def read(path: Path) -> list[dict[str, str]]:
    """By date, as they stand in the file on one day."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return sorted(csv.DictReader(file), key=lambda row: row["date"])


def newest(rows: list[dict[str, str]], model: str) -> dict[tuple[str, str], dict[str, str]]:
    """The last row of every (engine, checkpoint) made of a model."""
    return {(row["engine"], row["checkpoint"]): row for row in rows if row["model"] == model}
