"""Weights of every format, as `op.prepare` lays them out on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantkit.eval.kernels.cases import FORMATS
from quantkit.formats import CtFloat8, Float8Weight, Format, Gguf, GgufWeight
from quantkit.kernels.card import Card
from quantkit.kernels.linear.eight_bit import weight as eight_bit
from quantkit.kernels.linear.weight_only import gguf
from quantkit.kernels.linear.weight_only import weight as weight_only

# What is benchmarked, and the other things that may happen to the activations of FP8. W4A8 runs by the kernels of both.
SERVED: dict[str, Callable[[str], Format]] = {name: fmt for name, fmt in FORMATS.items() if name != "w4a8"} | {
    "fp8-static": lambda dtype: CtFloat8(strategy="tensor", activations="static", dtype=dtype),
    "fp8-exact": lambda dtype: CtFloat8(activations="exact", dtype=dtype),
    "fp8-block-exact": lambda dtype: CtFloat8(strategy="block", activations="exact", dtype=dtype),
}
# Blocks of GGUF: other widths and groups than those above, and scales in float32.
BLOCKS: dict[str, Callable[[str], Format]] = {
    f"gguf-{kind}": lambda _, kind=kind: Gguf(kind) for kind in ("Q2_K", "Q3_K", "Q4_K", "Q6_K")
}

TALL = 1024  # rows; blocks of all formats begin anew there


def served_on(card: Card) -> list[str]:
    """Formats whose kernels a card can run; others are decoded there."""
    return [name for name in SERVED if card.has_float8 or not name.startswith("fp8")]


@cache
def weight_of(name: str, outputs: int, inputs: int) -> Any:
    return _lay_out(name, outputs, inputs)


@cache
def shapes_of_weight(name: str, outputs: int, inputs: int) -> Any:
    """The same with tensors that have a shape and no memory."""
    return _without_data(_lay_out(name, outputs, inputs))


def _lay_out(name: str, outputs: int, inputs: int) -> Any:
    fmt = (SERVED | BLOCKS)[name]("bfloat16")
    if outputs > TALL:  # as many rows again: to quantize a vocabulary takes seconds in some formats
        rows = fmt.example((TALL, inputs))
        quantized = _repeated(rows, -(-outputs // TALL)).cut(slice(0, outputs), slice(0, inputs))
    else:
        quantized = fmt.example((outputs, inputs))
    if isinstance(quantized, GgufWeight):
        return gguf.lay_out_packed(quantized)
    if isinstance(quantized, Float8Weight) and name == "fp8-static":
        quantized = replace(quantized, input_scale=torch.ones(1))
    return eight_bit.lay_out(fmt, quantized) if eight_bit.takes(fmt) else weight_only.lay_out(quantized)


def _repeated(value: Any, times: int) -> Any:
    """A quantized weight of `times` as many rows; what has one entry, or is a table of values, belongs to all."""
    changed = {}
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Tensor) and part.numel() > 1 and field.name != "table":
            changed[field.name] = part.repeat(times, *[1] * (part.ndim - 1))
        elif is_dataclass(part) and not isinstance(part, type):
            changed[field.name] = _repeated(part, times)
        elif field.name == "full_shape":
            changed[field.name] = (part[0] * times, part[1])
    return replace(value, **changed)


def _without_data(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _without_data(getattr(value, field.name)) for field in fields(value)})
    return value
