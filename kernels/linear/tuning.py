"""Finding the fastest choice for every number of tokens, by measuring on the GPU that is there.

    tune_once(weight, expected)       measures what no table has, and keeps it where `dispatch.py` finds it

Candidates are those that won somewhere in a wide sweep on an H200. A choice whose result differs from the plain
meaning is never taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.linear import op
from quantkit.kernels.linear.dense.half import HalfConfig
from quantkit.kernels.linear.dense.weight import HalfWeight
from quantkit.kernels.linear.dispatch import (
    Choice,
    Weight,
    buckets_of,
    cache_folder,
    device_name,
    has_room_for_pairs,
    read_table,
    table_of,
    to_entry,
    weight_kind,
)
from quantkit.kernels.linear.eight_bit import scaled_mm
from quantkit.kernels.linear.eight_bit.matmul import EightBitConfig
from quantkit.kernels.linear.weight_only import hopper
from quantkit.kernels.linear.weight_only.hopper import HopperConfig
from quantkit.kernels.linear.weight_only.packed import TICKETS, PackedWeight
from quantkit.kernels.linear.weight_only.skinny import SkinnyConfig
from quantkit.kernels.reference.compare import relative_error

_COLD = 130e6  # bytes of weight copies that leave a cache of 60 MB cold
_SPLITS = (1, 2, 3, 4, 5, 6, 8, 12, 16)

# Most tokens -> (outputs, tokens, warps, stages, scale first)
_SKINNY: dict[int, list[tuple[int, int, int, int, bool]]] = {
    8: [(32, 8, 2, 3, False), (64, 8, 4, 3, False), (64, 8, 2, 3, False), (128, 8, 4, 3, False), (32, 8, 1, 3, False),
        (64, 8, 1, 3, False), (32, 16, 2, 3, False), (64, 16, 4, 3, False)],
    16: [(32, 16, 2, 3, False), (64, 16, 4, 3, False), (64, 16, 2, 3, False), (128, 16, 4, 3, False)],
    32: [(64, 32, 4, 3, False), (128, 32, 4, 3, False), (32, 32, 2, 3, False), (64, 16, 4, 3, False)],
    64: [(64, 64, 4, 3, False), (128, 64, 8, 3, False), (64, 32, 4, 3, False), (128, 32, 4, 3, False)],
    128: [(64, 128, 4, 3, False), (128, 128, 8, 3, False), (64, 64, 4, 3, False), (128, 64, 8, 3, False)],
    256: [(64, 128, 4, 3, False), (128, 128, 8, 3, False), (64, 64, 4, 3, False), (128, 64, 8, 3, False),
          (128, 256, 8, 2, True)],
    512: [(64, 128, 4, 3, False), (128, 128, 8, 3, False), (128, 64, 8, 3, False), (128, 256, 8, 2, True)],
    1024: [(64, 128, 4, 3, False), (128, 128, 8, 3, False), (128, 256, 8, 2, True)],
}  # fmt: skip
# The same for weights with a table of values, through a table of pairs: (outputs, tokens, warps, stages)
_PAIRS: dict[int, list[tuple[int, int, int, int]]] = {
    8: [(64, 8, 4, 3), (128, 8, 4, 3), (128, 8, 8, 3), (256, 8, 8, 3)],
    16: [(64, 16, 4, 3), (128, 16, 4, 3), (256, 16, 8, 3)],
    32: [(64, 32, 4, 3), (128, 32, 4, 3), (128, 32, 8, 3)],
    64: [(64, 64, 4, 3), (128, 64, 8, 3)],
}
_HOPPER = (
    HopperConfig(256, 3),
    HopperConfig(256, 3, 0),
    HopperConfig(256, 3, 2),
    HopperConfig(256, 3, 4),
    HopperConfig(128, 4),
    HopperConfig(128, 4, 0),
    HopperConfig(128, 4, 2),
    HopperConfig(128, 4, 4),
    HopperConfig(128, 4, 1, 192),
    HopperConfig(128, 4, 0, 192),
    HopperConfig(64, 6, 0),
    HopperConfig(64, 6, 0, 192),
)
# Most tokens -> (outputs, tokens, depth, warps, stages)
_MANY = [
    (128, 64, 128, 4, 4),
    (128, 128, 128, 4, 3),
    (128, 128, 128, 8, 4),
    (128, 256, 128, 8, 3),
    (256, 128, 128, 8, 3),
]
_EIGHT_BIT: dict[int, list[tuple[int, int, int, int, int]]] = {
    8: [(32, 8, 256, 2, 3), (32, 8, 256, 2, 4), (32, 8, 256, 1, 3), (64, 8, 128, 2, 4), (64, 8, 256, 2, 3)],
    16: [(64, 16, 128, 2, 4), (32, 16, 256, 2, 3), (64, 16, 256, 2, 3), (64, 16, 128, 4, 3), (128, 16, 256, 4, 3)],
    32: [(64, 32, 256, 4, 3), (64, 32, 128, 4, 4), (128, 32, 128, 4, 4)],
    64: [(64, 64, 128, 4, 4), (128, 64, 128, 8, 4), (64, 32, 256, 4, 3)],
    128: _MANY,
    256: _MANY,
    512: _MANY,
    1024: _MANY,
}
_FEW_TOKENS = [(64, 16, 128, 4, 4), (64, 16, 128, 4, 6), (64, 16, 128, 4, 8), (64, 16, 256, 4, 4), (128, 16, 128, 4, 3)]
_HALF: dict[int, list[tuple[int, int, int, int, int]]] = {
    1: [(2, 1, 2048, 4, 1), (2, 1, 4096, 4, 1), (4, 1, 1024, 4, 1), (4, 1, 2048, 4, 1), (8, 1, 512, 2, 1),
        (32, 8, 256, 2, 3), *_FEW_TOKENS],
    8: [(32, 8, 256, 2, 3), (32, 8, 256, 2, 4), (64, 8, 128, 4, 4), *_FEW_TOKENS],
    16: _FEW_TOKENS,
    32: [(64, 32, 128, 4, 3), (64, 32, 128, 4, 4), (64, 32, 128, 4, 6), (128, 32, 128, 4, 4)],
    64: [(64, 64, 128, 4, 4), (256, 64, 64, 8, 4), (64, 32, 128, 4, 6)],
}  # fmt: skip


def candidates(weight: Weight, most: int) -> Iterator[Choice]:
    """Everything worth a measurement for this many tokens."""
    if isinstance(weight, PackedWeight):
        for outputs, tokens, warps, stages, first in _SKINNY[most]:
            for splits in _useful_splits(weight.outputs, outputs, most, tokens, weight.chunks):
                yield Choice("skinny", SkinnyConfig(outputs, tokens, warps, stages, splits, first), "")
        for outputs, tokens, warps, stages in _PAIRS.get(most, []) if has_room_for_pairs(weight) else []:
            for splits in _useful_splits(weight.outputs, outputs, most, tokens, weight.chunks):
                if weight.rows % outputs == 0:
                    yield Choice("skinny", SkinnyConfig(outputs, tokens, warps, stages, splits, copies=32), "")
        if most >= 128:
            yield Choice("dequantize", None, "")
        if most >= 64 and hopper.supports(weight):
            yield from (Choice("hopper", config, "") for config in hopper_configs(weight, most))
        return
    if isinstance(weight, HalfWeight):
        for outputs, tokens, depth, warps, stages in _HALF[most]:
            for splits in _useful_splits(weight.outputs, outputs, most, tokens, weight.inputs // depth):
                yield Choice("half", HalfConfig(outputs, tokens, depth, warps, stages, splits), "")
        yield Choice("cublas", None, "")
        return
    for outputs, tokens, depth, warps, stages in _EIGHT_BIT[most]:
        if weight.columns % depth == 0 and (depth == 128 or weight.scales.ndim == 1):
            for splits in _useful_splits(weight.outputs, outputs, most, tokens, weight.columns // depth):
                yield Choice("eight_bit", EightBitConfig(outputs, tokens, depth, warps, stages, splits), "")
    if scaled_mm.supports(weight):
        yield Choice("scaled_mm", None, "")


def hopper_configs(weight: PackedWeight, most: int) -> Iterator[HopperConfig]:
    """Those whose tiles are not mostly empty, and that split no more than fills a large GPU.

    8-bit words leave no registers for three groups of warps with 128 tokens.
    """
    for config in _HOPPER:
        tiles = -(-weight.outputs // config.outputs) * -(-most // config.tokens)
        spills = weight.kind == "int8" and config.outputs > 128 and config.tokens > 64
        if config.tokens <= most and (config.splits <= 1 or tiles * config.splits <= 160) and not spills:
            yield config


def _useful_splits(outputs: int, tile: int, most: int, tokens: int, steps: int) -> list[int]:
    tiles = -(-outputs // tile) * -(-most // tokens)
    return [n for n in _SPLITS if n == 1 or (tiles * n <= 3200 and tiles <= TICKETS and 2 * n <= steps and most <= 256)]


def tune(
    weight: Weight,
    expected: Callable[[Tensor], Tensor],
    *,
    buckets: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Any]]:
    """Most tokens -> the fastest entry. `expected` is the plain meaning, to check results with."""
    copies = [weight, *(_copy(weight) for _ in range(int(_COLD / weight.nbytes)))]
    entries = {}
    for most in buckets or buckets_of(weight):
        x = torch.randn(most, weight.inputs, device=weight.device, dtype=dtype)
        right = expected(x)
        best = float("inf")
        for choice in candidates(weight, most):
            try:
                if not relative_error(op.run(choice, x, weight), right) < 2e-2:
                    progress(f"wrong: {choice}")
                    continue
                time = microseconds([_call(choice, x, copy) for copy in copies])
            except Exception as error:  # too much shared memory on this GPU, for one
                progress(f"does not run here: {choice} ({type(error).__name__})")
                continue
            if time < best:
                best, entries[str(most)] = time, to_entry(choice)
        progress(f"{weight_kind(weight)} {weight.outputs}x{weight.inputs} {most}: {best:.1f} us {entries[str(most)]}")
    return entries


def tune_once(
    weight: Weight,
    expected: Callable[[Tensor], Tensor],
    *,
    again: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> bool:
    """Whether there was something to measure: nothing is, where this GPU's table has this kind and shape already."""
    gpu = device_name(weight.device)
    kind, shape = weight_kind(weight), f"{weight.outputs}x{weight.inputs}"
    if not again and shape in table_of(gpu).get(kind, {}):
        return False
    dtype = weight.values.dtype if isinstance(weight, HalfWeight) else torch.bfloat16
    save({kind: {shape: tune(weight, expected, dtype=dtype, progress=progress)}}, cache_folder() / f"{gpu}.json")
    table_of.cache_clear()
    return True


def _call(choice: Choice, x: Tensor, weight: Weight) -> Callable[[], Any]:
    return lambda: op.run(choice, x, weight)


def _copy(weight: Weight) -> Weight:
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    cloned: dict[str, Any] = {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}
    return replace(weight, **cloned)


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
