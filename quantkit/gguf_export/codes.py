"""Codes of another format as GGUF blocks, where that changes no weight: symmetric 4 bits as Q4_0, 8 bits as Q8_0.

A block of 32 inputs has one scale in float16. Groups of 64 or 128, or whole rows, fit too: blocks repeat the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import CannotHold
from quantkit.formats import Format, Gguf, GgufWeight, IntegerFormat, IntegerWeight, QuantizedWeight
from quantkit.formats.gguf import TYPES

_OF_BITS = {4: "Q4_0", 8: "Q8_0"}


def block_kind(module: str, fmt: Format) -> str:
    """The type that holds a layer's codes, if its scales fit too; refuses a format whose codes no type holds."""
    if isinstance(fmt, Gguf):
        return fmt.kind
    if not isinstance(fmt, IntegerFormat) or fmt.bits not in _OF_BITS or fmt.input_rounding is not None:
        raise CannotHold(
            f"{module} is {fmt.name} {fmt.describe()}, whose codes no GGUF type holds; symmetric 4 and 8 bits in "
            "groups of 32 or multiples of it can be converted; else use quantize -r q4_k_m on the original model"
        )
    return _OF_BITS[fmt.bits]


def as_blocks(module: str, weight: QuantizedWeight, kind: str) -> Tensor:
    """The layer's rows of blocks, uint8 [out, bytes]; decoded they are the same weights to the bit."""
    if isinstance(weight, GgufWeight):
        return Gguf(kind).pack(weight)["weight"]
    assert isinstance(weight, IntegerWeight)
    why = _refusal(weight, TYPES[kind].zero)
    if why:
        raise CannotHold(f"{module} cannot become {kind}: {why}")
    blocks = weight.shape[1] // TYPES[kind].size
    scale = weight.scales.repeat_interleave(blocks // weight.scales.shape[1], 1).half()
    found = GgufWeight(TYPES[kind], weight.codes, scale, None, None, None, TYPES[kind].size, TYPES[kind].group)
    return Gguf(kind).pack(found)["weight"]


def _refusal(weight: IntegerWeight, zero: int) -> str:
    """Why blocks of 32 with one float16 scale and this zero do not hold the codes; empty: they do."""
    if weight.group_of is not None:
        return "act-order scatters its groups"
    if (weight.shape[1] // weight.scales.shape[1]) % 32 or weight.shape[1] % 32:
        return "its groups are no multiple of 32 inputs"
    if not bool((weight.zeros == zero).all()):
        return "it has zero points"
    if not torch.equal(weight.scales.half().float(), weight.scales.float()):
        return "its scales are no float16 numbers, so they would be rounded; use quantize on the original model"
    return ""
