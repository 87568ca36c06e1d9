"""Which kernel, cut how, for a weight and a number of tokens: one table decides, and can say why.

The table of a GPU is a JSON file: `tuned/nvidia-h200.json` ships with quantkit, others are made once by `tuning.py` and
kept in the user's cache. It maps

    kind of weight ("int4-g128") -> "outputs x inputs" -> most tokens ("16") -> [kernel, *numbers of its config]

A shape that nobody measured gets the weight's own default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import InputError
from quantkit.kernels.card import card_of, runs_kernels
from quantkit.kernels.linear.weight import Choice, Kernel, LinearWeight, shape_of

BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024)  # tokens; the last one stands for everything above too
SHIPPED = Path(__file__).parent / "tuned"
Table = Mapping[str, Mapping[str, Mapping[str, list[Any]]]]
_hidden = False


def choose(
    weight: LinearWeight, tokens: int, table: Table | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> Choice:
    """The kernel for this many tokens of this dtype, from the table of the weight's GPU unless another is given."""
    most = weight.bucket(tokens)
    if most is not None:
        measured = _measured(weight, most, _table(weight) if table is None else table, dtype)
        if measured is not None:
            return measured
    return weight.default(tokens, card_of(weight.device), dtype)


def _measured(weight: LinearWeight, most: int, table: Table, dtype: torch.dtype) -> Choice | None:
    shape = shape_of(weight)
    for kind in (weight.kind, *weight.relatives):
        entry = table.get(kind, {}).get(shape, {}).get(str(most))
        if entry is not None and weight.kernels[entry[0]].supports(weight, dtype):
            return from_entry(entry, weight.kernels, f"measured for {kind} {shape} at {most} tokens")
    return None


def is_measured(weight: LinearWeight, table: Table | None = None) -> bool:
    """Whether the table of the weight's GPU, unless another is given, has its shape."""
    table = _table(weight) if table is None else table
    return any(shape_of(weight) in table.get(kind, {}) for kind in (weight.kind, *weight.relatives))


def from_entry(entry: list[Any], kernels: Mapping[str, Kernel], why: str) -> Choice:
    name, *numbers = entry
    config = kernels[name].config
    return Choice(name, None if config is None else config(*numbers), why)


def to_entry(choice: Choice) -> list[Any]:
    return [choice.kernel, *(astuple(choice.config) if choice.config is not None else ())]


def bucket_of(tokens: int, buckets: Sequence[int] = BUCKETS) -> int:
    return next((most for most in buckets if tokens <= most), buckets[-1])


def _table(weight: LinearWeight) -> Table:
    return {} if _hidden else table_of(device_name(weight.device))


@contextmanager
def hidden_tables() -> Iterator[None]:
    """Within, no measurement is known, as on a GPU that nobody has tuned: what estimates alone are worth."""
    global _hidden
    before, _hidden = _hidden, True
    try:
        yield
    finally:
        _hidden = before


@cache
def table_of(gpu: str) -> Table:
    """The table of a GPU by its name: what ships, and over it what was tuned on this machine; empty without either."""
    table: dict[str, dict[str, Any]] = {}
    for folder in (SHIPPED, cache_folder()):
        for kind, shapes in read_table(folder / f"{gpu}.json").items():
            table.setdefault(kind, {}).update(shapes)
    return table


def read_table(file: Path) -> Table:
    """A table from its file; empty where there is none."""
    if not file.exists():
        return {}
    try:
        table: Table = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is not a table of kernels ({error}); delete it to tune again") from error
    return table


def cache_folder() -> Path:
    return Path.home() / ".cache" / "quantkit" / "tuned"


def device_name(device: torch.device) -> str:
    """`nvidia-h200` of `NVIDIA H200`."""
    return file_name(card_of(device).name) if runs_kernels(device) else device.type


def file_name(gpu: str) -> str:
    """Of the table of a GPU that its driver calls so."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
