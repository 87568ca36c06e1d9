"""eval/results/peers.csv: a line for every checkpoint that was made and measured. The newest of its kind counts."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quantkit.eval.engine.csv_file import append

RESULTS = Path("eval/results/peers.csv")


@dataclass(frozen=True)
class Row:
    date: str
    machine: str
    tool: str
    version: str
    method: str
    bits: int
    group: int
    steps: int | None  # None: the tool's own number, or not learned
    model: str
    origin: str  # what the model is made of
    calibration: str  # default, in-domain or none: what its text is to the one that judges
    calibrated_on: str
    seconds: float  # of the tool's whole process
    peak_host_gib: float
    peak_gpu_gib: float
    bits_per_weight: float  # of the layers that were quantized
    perplexity: float
    base_perplexity: float
    kl: float
    top1_agreement: float
    protocol: str
    command: str
    measured_by: str

    @property
    def kind(self) -> tuple[object, ...]:
        """Of which the newest row counts."""
        return (self.model, self.tool, self.method, self.bits, self.group, self.steps, self.calibration)

    def to_dict(self) -> dict[str, object]:
        return {name: "" if value is None else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, given: dict[str, str]) -> Row:
        readers: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
        readers["int | None"] = lambda text: int(text) if text else None
        return cls(**{field.name: readers[str(field.type)](given[field.name]) for field in fields(cls)})


COLUMNS = tuple(field.name for field in fields(Row))


def keep(path: Path, row: Row) -> None:
    append(path, COLUMNS, row.to_dict())


def read(path: Path) -> list[Row]:
    """None where nothing was measured yet."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [Row.from_dict(line) for line in csv.DictReader(file)]


def newest(rows: Iterable[Row]) -> list[Row]:
    """In the order in which their kinds first came."""
    return list({row.kind: row for row in rows}.values())
