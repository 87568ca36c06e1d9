"""In which arithmetic packed weights are multiplied: in 16 bits, or in FP8 where a step has many tokens.

    16-bit    always in 16 bits
    fp8       many tokens in FP8, for which a weight is decoded to float8 in each step
    fp8-copy  the same from a copy in float8 that is there from the start: a byte more for each weight, fewer tokens pay
    None      as the format says: `fp8` where it rounds inputs to float8 (W4A8), else `16-bit`

It is for weights of at most 4 bits: formats of 8 bits have an arithmetic of their own, or would lose what they have
more than float8, and GGUF blocks stay in 16 bits. A CPU gains nothing by it. It computes any number of tokens as a GPU
computes many, so that quality can be measured there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from quantkit.formats import CtFloat8, CtPacked, Format, Gguf, QuantizedWeight
from quantkit.formats.float8_rows import float8_rows
from quantkit.kernels.card import runs_kernels
from quantkit.kernels.linear.decoded import device_of
from quantkit.kernels.linear.weight_only.float8 import Float8Steps
from quantkit.kernels.linear.weight_only.weight import why_not

ARITHMETIC = ("16-bit", "fp8", "fp8-copy")
_FLOAT8 = CtFloat8(dtype="float32")  # inputs by token, weights by row
_MOST_BITS = 4


class Meaning(NamedTuple):
    """What a layer computes: `reference.linear.linear` of these."""

    fmt: Format
    weight: QuantizedWeight


def multiplies_in_float8(fmt: Format, quantized: QuantizedWeight, arithmetic: str | None) -> bool:
    """Whether steps of many tokens do, where the card can."""
    if arithmetic is None:
        arithmetic = "fp8" if rounds_to_float8(fmt) else "16-bit"
    return arithmetic != "16-bit" and takes_float8(fmt) and why_not(quantized) is None


def takes_float8(fmt: Format) -> bool:
    """Whether it can be asked for layers of a format."""
    return fmt.bits <= _MOST_BITS and not isinstance(fmt, Gguf)


def rounds_to_float8(fmt: Format) -> bool:
    """Whether a format of packed weights asks for inputs in float8."""
    return isinstance(fmt, CtPacked) and fmt.activations == "fp8"


def with_exact_inputs(fmt: Format) -> Format:
    """The format as it is computed in 16 bits; 8-bit formats as they are."""
    return replace(fmt, activations="exact") if isinstance(fmt, CtPacked) else fmt


def meaning_of_few(fmt: Format, quantized: QuantizedWeight, arithmetic: str | None) -> Meaning:
    """Of a step with few tokens on the device of the weight."""
    if not runs_kernels(device_of(quantized)) and multiplies_in_float8(fmt, quantized, arithmetic):
        return in_float8(quantized)
    return Meaning(with_exact_inputs(fmt), quantized)


def meaning_of_many(weight: Float8Steps, quantized: QuantizedWeight, tokens: int, dtype: torch.dtype) -> Meaning:
    """Of a step with so many tokens: inputs are rounded, and the weight where its kernel does that."""
    return in_float8(quantized) if weight.rounds_itself(tokens, dtype) else Meaning(_FLOAT8, quantized)


def in_float8(quantized: QuantizedWeight) -> Meaning:
    return Meaning(_FLOAT8, float8_rows(quantized))
