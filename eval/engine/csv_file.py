"""Results files that grow: a row at a time, and new columns at the end of old files."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import InputError, StorageError


def results_path(output: Path | None, save: bool, usual: Path, columns: Sequence[str]) -> Path | None:
    """--output, else the results of the checkout that this is run in, else nowhere. Checks an existing file first."""
    if not save:
        if output is not None:
            raise InputError("--output names a file and --no-save forbids one; give one of them")
        return None
    path = output or (usual if usual.parent.is_dir() and Path("pyproject.toml").is_file() else None)
    if path is not None:
        if not path.parent.is_dir():
            raise StorageError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
        check_header(path, columns)
    return path


def check_header(path: Path, columns: Sequence[str]) -> bool:
    """Whether a file has all of today's columns. It may lack the last ones; with others it is refused."""
    try:
        if not path.exists() or path.stat().st_size == 0:
            return True
        with path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StorageError(f"cannot read {path}: {error}; choose another --output") from error
    if header != list(columns[: len(header)]):
        raise StorageError(f"{path} has other columns than this version writes; choose another --output")
    return len(header) == len(columns)


def append(path: Path, columns: Sequence[str], row: Mapping[str, Any]) -> None:
    """One row at a time, so that an interrupted run loses nothing."""
    try:
        if not check_header(path, columns):
            _widen(path, columns)
        fresh = not path.exists() or path.stat().st_size == 0
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(row)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; choose another --output") from error


def _widen(path: Path, columns: Sequence[str]) -> None:
    """Gives a file today's columns; rows from before have nothing in the new ones."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    beside.replace(path)
