"""Finding the fastest choice for every number of tokens, by measuring on the GPU that is there.

    tune_once(weight, expected)       measures what no table has, and keeps it where `dispatch.py` finds it

Weights say what is worth trying (`LinearWeight.candidates`). A choice whose result differs from the plain meaning is
never taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.linear import op
from quantkit.kernels.linear.dispatch import cache_folder, device_name, read_table, table_of, to_entry
from quantkit.kernels.linear.weight import Choice, LinearWeight, shape_of
from quantkit.kernels.reference.compare import relative_error

_LARGEST_ERROR = 2e-2  # relative
_COLD = 130e6  # bytes of weight copies that leave a cache of 60 MB cold


def tune(
    weight: LinearWeight,
    expected: Callable[[Tensor], Tensor],
    *,
    buckets: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    largest_error: float = _LARGEST_ERROR,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Any]]:
    """Most tokens -> the fastest entry. `expected` is the plain meaning, to check results with."""
    copies = cold_copies(weight)
    entries = {}
    for most in buckets or weight.buckets:
        x = torch.randn(most, weight.inputs, device=weight.device, dtype=dtype)
        right = expected(x)
        best = float("inf")
        for choice in weight.candidates(most):
            try:
                if not relative_error(op.run(choice, x, weight), right) < largest_error:
                    progress(f"wrong: {choice}")
                    continue
                time = microseconds([_call(choice, x, copy) for copy in copies])
            except Exception as error:  # too much shared memory on this GPU, for one
                progress(f"does not run here: {choice} ({type(error).__name__})")
                continue
            if time < best:
                best, entries[str(most)] = time, to_entry(choice)
        progress(f"{weight.kind} {shape_of(weight)} {most}: {best:.1f} us {entries[str(most)]}")
    return entries


def tune_once(
    weight: LinearWeight,
    expected: Callable[[Tensor], Tensor],
    *,
    again: bool = False,
    largest_error: float = _LARGEST_ERROR,
    progress: Callable[[str], None] = lambda line: None,
) -> bool:
    """Whether there was something to measure: nothing is, where this GPU's table has this kind and shape already, or
    where no table lists such weights."""
    gpu, shape = device_name(weight.device), shape_of(weight)
    if not weight.buckets or (not again and shape in table_of(gpu).get(weight.kind, {})):
        return False
    entries = tune(weight, expected, dtype=weight.token_dtype, largest_error=largest_error, progress=progress)
    save({weight.kind: {shape: entries}}, cache_folder() / f"{gpu}.json")
    table_of.cache_clear()
    return True


def cold_copies(weight: LinearWeight) -> list[LinearWeight]:
    """The weight and copies of it: used in turn, none is in a cache when its turn comes."""
    return [weight, *(_copy(weight) for _ in range(int(_COLD / weight.nbytes)))]


def _call(choice: Choice, x: Tensor, weight: LinearWeight) -> Callable[[], Any]:
    return lambda: op.run(choice, x, weight)


def _copy(weight: Any) -> Any:
    """Of a weight, which is a frozen dataclass, with tensors of its own."""
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return replace(weight, **{name: value.clone() for name, value in values.items() if isinstance(value, Tensor)})


def microseconds(calls: list[Callable[[], Any]], repeats: int = 10) -> float:
    """Median time of one of these calls, replayed as one CUDA graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[repeats // 2]


def save(table: dict[str, dict[str, dict[str, list[Any]]]], file: Path) -> None:
    """Adds measurements to a table's file; one line per shape, so that changes can be read."""
    merged: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for known in (read_table(file), table):
        for kind, measured in known.items():
            for shape, entries in measured.items():
                merged.setdefault(kind, {}).setdefault(shape, {}).update(entries)
    lines = []
    for kind, shapes in sorted(merged.items()):
        rows = ",\n".join(f"    {json.dumps(shape)}: {json.dumps(entry)}" for shape, entry in sorted(shapes.items()))
        lines.append(f"  {json.dumps(kind)}: {{\n{rows}\n  }}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
