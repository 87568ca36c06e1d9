"""Which kernel, cut how, for a weight and a number of tokens: one table decides, and can say why.

The table of a GPU is a JSON file: `tuned/nvidia-h200.json` ships with quantkit, others are made once by `tuning.py` and
kept in the user's cache. It maps

    kind of weight ("int4-g128") -> "outputs x inputs" -> most tokens ("16") -> [kernel, *numbers of its config]

A shape that nobody measured gets the defaults below, with as many splits as fill the GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from quantkit.errors import InputError
from quantkit.kernels.linear.dense.half import HalfConfig
from quantkit.kernels.linear.dense.weight import HalfWeight
from quantkit.kernels.linear.eight_bit import scaled_mm
from quantkit.kernels.linear.eight_bit.matmul import EightBitConfig
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.weight_only import hopper
from quantkit.kernels.linear.weight_only.hopper import HopperConfig
from quantkit.kernels.linear.weight_only.packed import PackedWeight
from quantkit.kernels.linear.weight_only.skinny import SkinnyConfig

BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024)  # tokens; the last one stands for everything above too
HALF_BUCKETS = (1, 8, 16, 32, 64)  # of weights that are not quantized, which are cuBLAS's for more tokens
SHIPPED = Path(__file__).parent / "tuned"
Weight = PackedWeight | EightBitWeight | HalfWeight
Table = Mapping[str, Mapping[str, Mapping[str, list[Any]]]]

# Most tokens -> tile and programs per multiprocessor that the sweep on an H200 favoured (docs/kernels.md).
_SKINNY = {
    8: (SkinnyConfig(32, 8, 2, 3), 7),
    16: (SkinnyConfig(64, 16, 4, 3), 6),
    32: (SkinnyConfig(64, 32, 4, 3), 4),
    64: (SkinnyConfig(64, 64, 4, 3), 3),
    128: (SkinnyConfig(64, 128, 4, 3), 2),
    256: (SkinnyConfig(64, 128, 4, 3), 2),
}
# The same for weights with a table of values, where a multiprocessor has room for tables of pairs
# (`weight_only/assembly.py`).
_PAIRS = {
    8: (SkinnyConfig(128, 8, 4, 3, copies=32), 4),
    16: (SkinnyConfig(128, 16, 4, 3, copies=32), 3),
    32: (SkinnyConfig(128, 32, 4, 3, copies=32), 2),
    64: (SkinnyConfig(128, 64, 8, 3, copies=32), 2),
}
_ROOM_FOR_PAIRS = 160 << 10  # bytes of shared memory
_EIGHT_BIT = {
    8: (EightBitConfig(32, 8, 256, 2, 3), 7),
    16: (EightBitConfig(64, 16, 128, 2, 4), 4),
    32: (EightBitConfig(64, 32, 256, 4, 3), 3),
    64: (EightBitConfig(64, 64, 128, 4, 4), 2),
    128: (EightBitConfig(128, 64, 128, 4, 4), 2),
    256: (EightBitConfig(128, 64, 128, 4, 4), 2),
    512: (EightBitConfig(128, 128, 128, 4, 3), 1),
    1024: (EightBitConfig(128, 128, 128, 4, 3), 1),
}
# And for weights that are not quantized.
_HALF = {
    1: (HalfConfig(4, 1, 1024, 4, 1), 8),
    8: (HalfConfig(64, 16, 128, 4, 4), 2),
    16: (HalfConfig(64, 16, 128, 4, 4), 2),
}
# Kinds of packed weights that were measured, for groups and zero points that were not.
_RELATIVES = {
    "int2": "int2-g64-zeros",
    "int3": "int3-g128",
    "int4": "int4-g128",
    "int8": "int8-g128",
    "nf4": "nf4-g64-nested",
    "fp4": "fp4-g64-nested",
}
_LARGE = 1 << 22  # weights: 8 MB, which an H200 reads in 2 us; below, launching takes longer than reading


_MANY_TOKENS = 4096  # H200, Llama-3.1-8B in W4: an engine's step of 8,192 tokens takes 203 ms so, 227 with `hopper`
_FEWEST_CHUNKS = 6  # of a multiprocessor, for which sharing tiles pays
_FEWEST_OF_3_BITS = 16  # tokens of a tile (H200, gate_up, one token: 32 us with 16, 43 with 8)
_FEWEST_FOR_BLOCKS = 256  # tokens (H200: 0.6 to 1.3 of bf16's time from here on, the Triton kernel 3 to 4 times it)


@dataclass(frozen=True)
class Choice:
    """`kernel` is skinny, hopper, dequantize (then a plain matmul), eight_bit or scaled_mm (torch's own, for FP8).

    For weights that are not quantized it is half, or cublas (torch's own).
    """

    kernel: str
    config: SkinnyConfig | HopperConfig | EightBitConfig | HalfConfig | None
    why: str


def choose(weight: Weight, tokens: int, table: Table | None = None, *, dtype: torch.dtype = torch.bfloat16) -> Choice:
    """The kernel for this many tokens, from the table of the weight's GPU unless another is given.

    `dtype` is that of the tokens, which torch's own kernel is particular about.
    """
    if tokens >= _MANY_TOKENS and isinstance(weight, PackedWeight):
        return Choice("dequantize", None, f"{_MANY_TOKENS} tokens and more always pay for decoding once")
    if tokens > HALF_BUCKETS[-1] and isinstance(weight, HalfWeight):
        return Choice("cublas", None, f"not quantized, and more than {HALF_BUCKETS[-1]} tokens")
    if table is None:
        table = table_of(device_name(weight.device))
    most = bucket(tokens, buckets_of(weight))
    shape = f"{weight.outputs}x{weight.inputs}"
    for kind in (weight_kind(weight), relative_of(weight)):
        entry = table.get(kind, {}).get(shape, {}).get(str(most))
        if entry is not None and _runs(entry, weight, dtype):
            return from_entry(entry, f"measured for {kind} {shape} at {most} tokens")
    return default_choice(weight, most, multiprocessors(weight.device), dtype)


def default_choice(weight: Weight, most: int, processors: int, dtype: torch.dtype = torch.bfloat16) -> Choice:
    """What an unmeasured shape gets."""
    why = f"no measurement of {weight_kind(weight)} {weight.outputs}x{weight.inputs} on this GPU"
    if isinstance(weight, HalfWeight):
        if most not in _HALF or weight.outputs * weight.inputs < _LARGE or weight.inputs % 8:
            return Choice("cublas", None, f"{why}; many tokens, or few weights")
        half, programs = _HALF[most]
        tiles, steps = triton.cdiv(weight.outputs, half.outputs), triton.cdiv(weight.inputs, half.depth)
        return Choice("half", replace(half, splits=splits(tiles, steps, processors * programs)), why)
    if isinstance(weight, EightBitWeight):
        if most >= _FEWEST_FOR_BLOCKS and weight.scales.ndim == 2 and scaled_mm.supports(weight, dtype):
            return Choice("scaled_mm", None, "many tokens with scales of blocks, which torch's own kernel does best")
        config, programs = _EIGHT_BIT[most]
        steps = weight.columns // config.depth
        if weight.columns % config.depth or weight.scales.ndim == 2:  # 128 divides every weight's columns and blocks
            config, steps = replace(config, depth=128), weight.columns // 128
        tiles = triton.cdiv(weight.outputs, config.outputs) * triton.cdiv(most, config.tokens)
        return Choice("eight_bit", replace(config, splits=splits(tiles, steps, processors * programs)), why)
    if most >= 256 and hopper.supports(weight):
        large, small = HopperConfig(), HopperConfig(tokens=128, stages=4, splits=0)
        if triton.cdiv(weight.outputs, large.outputs) * triton.cdiv(most, large.tokens) >= 0.75 * processors:
            return Choice("hopper", large, f"{why}; tiles enough for every multiprocessor")
        tiles = triton.cdiv(weight.outputs, small.outputs) * triton.cdiv(most, small.tokens)
        if tiles * weight.chunks >= _FEWEST_CHUNKS * processors:
            return Choice("hopper", small, f"{why}; equal shares of the tiles for every multiprocessor")
    if most not in _SKINNY:
        return Choice("dequantize", None, f"{why}; many tokens pay for decoding once")
    if weight.kind == "int3":
        most = max(most, _FEWEST_OF_3_BITS)
    skinny, programs = _PAIRS[most] if most in _PAIRS and has_room_for_pairs(weight) else _SKINNY[most]
    tiles = triton.cdiv(weight.outputs, skinny.outputs) * triton.cdiv(most, skinny.tokens)
    return Choice("skinny", replace(skinny, splits=splits(tiles, weight.chunks, processors * programs)), why)


def has_room_for_pairs(weight: PackedWeight) -> bool:
    if weight.table is None or weight.device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(weight.device).shared_memory_per_multiprocessor >= _ROOM_FOR_PAIRS


def _runs(entry: list[Any], weight: Weight, dtype: torch.dtype) -> bool:
    """Whether a measured choice, perhaps of a relative, can be run: torch's own kernel is particular."""
    return entry[0] != "scaled_mm" or (isinstance(weight, EightBitWeight) and scaled_mm.supports(weight, dtype))


def splits(tiles: int, steps: int, programs: int) -> int:
    """The power of two that brings tiles nearest to the wanted number of programs, with two steps each at least."""
    wanted = 1
    while wanted * 2 * tiles <= programs and wanted * 4 <= steps:
        wanted *= 2
    return wanted


def bucket(tokens: int, buckets: Sequence[int] = BUCKETS) -> int:
    return next((most for most in buckets if tokens <= most), buckets[-1])


def buckets_of(weight: Weight) -> tuple[int, ...]:
    return HALF_BUCKETS if isinstance(weight, HalfWeight) else BUCKETS


def weight_kind(weight: Weight) -> str:
    """Weights of one kind run the same code."""
    if isinstance(weight, HalfWeight):
        return "bf16" if weight.values.dtype == torch.bfloat16 else "fp16"
    if isinstance(weight, EightBitWeight):
        return f"{weight.kind}-{weight.activations}" + ("-blocks" if weight.scales.ndim == 2 else "")
    group = "row" if weight.one_group else f"g{weight.group}"
    extras = ("-zeros" if weight.zeros is not None else "") + ("-nested" if weight.nested is not None else "")
    return f"{weight.kind}-{group}{extras}"


def relative_of(weight: Weight) -> str:
    """The kind whose measurements serve for kinds that nobody measured: the same work per weight, or nearly."""
    if isinstance(weight, HalfWeight):
        return "bf16"
    if isinstance(weight, EightBitWeight):
        return f"{weight.kind}-token" if weight.scales.ndim == 1 else ""
    return _RELATIVES[weight.kind]


def from_entry(entry: list[Any], why: str) -> Choice:
    kernel, *numbers = entry
    if kernel == "skinny":
        return Choice(kernel, SkinnyConfig(*numbers), why)
    if kernel == "hopper":
        return Choice(kernel, HopperConfig(*numbers), why)
    if kernel == "half":
        return Choice(kernel, HalfConfig(*numbers), why)
    return Choice(kernel, EightBitConfig(*numbers) if kernel == "eight_bit" else None, why)


def to_entry(choice: Choice) -> list[Any]:
    return [choice.kernel, *(astuple(choice.config) if choice.config is not None else ())]


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
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
