"""Linear layers whose weights are one byte each: LLM.int8, W8A8 and FP8.

    values   int8 or float8_e4m3 [rows, columns]   outputs and inputs rounded up to 128; padding is zero
    scales   float32 [rows], or [rows / 128, columns / 128] where weights have blocks

What happens to the activations is part of the format:

    outliers  LLM.int8: columns with a magnitude of `threshold` or more in any token stay in 16 bit, the rest becomes
              signed bytes with one scale per token
    token     one scale per token (W8A8, FP8)
    block     one scale per token and 128 inputs (FP8 with blocks)
    static    one scale for everything, found by calibration (FP8)
    exact     not rounded (FP8 weights only)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import (
    AbsmaxInt8Weight,
    CtFloat8,
    CtInt8,
    Float8Weight,
    Format,
    IntegerWeight,
    LlmInt8,
    QuantizedWeight,
)
from quantkit.formats.base import quotient
from quantkit.kernels.card import Card
from quantkit.kernels.linear.dispatch import BUCKETS, bucket_of
from quantkit.kernels.linear.fuse import same
from quantkit.kernels.linear.weight import CHUNK, ROWS, TICKETS, Choice, Kernel, LinearWeight, padded


@dataclass(frozen=True)
class EightBitWeight:
    """One linear layer's weight as the 8-bit kernels read it."""

    outputs: int
    inputs: int
    values: Tensor
    scales: Tensor
    activations: str  # outliers | token | block | static | exact
    threshold: float  # of outliers; infinite where there are none
    input_scale: Tensor | None  # float32 [1], only static
    tickets: Tensor  # int32, zero between calls

    @property
    def code_type(self) -> str:
        return "int8" if self.values.dtype == torch.int8 else "fp8"

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        return self.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.numel() + self.scales.numel() * 4

    @property
    def kind(self) -> str:
        return f"{self.code_type}-{self.activations}" + ("-blocks" if self.scales.ndim == 2 else "")

    @property
    def relatives(self) -> tuple[str, ...]:
        return (f"{self.code_type}-token",) if self.scales.ndim == 1 else ()

    @property
    def buckets(self) -> tuple[int, ...]:
        return BUCKETS

    @property
    def output_unit(self) -> int:
        return ROWS

    @property
    def token_dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        from quantkit.kernels.linear.eight_bit.choices import KERNELS  # needs Triton

        return KERNELS

    def bucket(self, tokens: int) -> int | None:
        return bucket_of(tokens)

    def default(self, tokens: int, card: Card, dtype: torch.dtype = torch.bfloat16) -> Choice:
        from quantkit.kernels.linear.eight_bit.choices import default

        return default(self, tokens, card, dtype)

    def candidates(self, tokens: int) -> Iterator[Choice]:
        from quantkit.kernels.linear.eight_bit.choices import candidates

        return candidates(self, tokens)

    def join(self, others: Sequence[LinearWeight]) -> EightBitWeight | None:
        alike = [weight for weight in others if isinstance(weight, EightBitWeight)]
        return _join([self, *alike]) if len(alike) == len(others) else None


def _join(weights: Sequence[EightBitWeight]) -> EightBitWeight | None:
    """Static activation scales are one number, which must be the same for all."""
    first = weights[0]
    for weight in weights[1:]:
        alike = (weight.kind, weight.inputs, weight.threshold) == (first.kind, first.inputs, first.threshold)
        if not alike or not same(weight.input_scale, first.input_scale):
            return None
    bytes_ = torch.cat([weight.values.view(torch.uint8) for weight in weights])
    return replace(
        first,
        outputs=sum(weight.outputs for weight in weights),
        values=bytes_.view(first.values.dtype),
        scales=torch.cat([weight.scales for weight in weights]),
    )


def takes(fmt: Format) -> bool:
    """Whether weights of a format are laid out here."""
    return isinstance(fmt, LlmInt8 | CtInt8 | CtFloat8)


def lay_out(fmt: Format, weight: QuantizedWeight) -> EightBitWeight:
    """In the order of the kernels, on the device where it is."""
    if isinstance(fmt, LlmInt8) and isinstance(weight, AbsmaxInt8Weight):
        return _lay_out(
            weight.codes, quotient(weight.row_absmax, 127), "outliers", threshold=fmt.threshold or float("inf")
        )
    if isinstance(fmt, CtInt8) and isinstance(weight, IntegerWeight):
        return _lay_out((weight.codes ^ 128).view(torch.int8), weight.scales.float().flatten(), "token")
    if isinstance(fmt, CtFloat8) and isinstance(weight, Float8Weight):
        return _lay_out_float8(fmt, weight)
    raise InputError(f"8-bit kernels do not take {type(weight).__name__} of format '{fmt.name}'")


def _lay_out_float8(fmt: CtFloat8, weight: Float8Weight) -> EightBitWeight:
    scales = weight.scales.float()
    if fmt.strategy == "block":
        activations = "exact" if fmt.activations == "exact" else "block"
    else:
        activations = "token" if fmt.activations == "dynamic" else fmt.activations
        scales = scales.flatten().expand(weight.shape[0])
    return _lay_out(weight.values, scales, activations, input_scale=weight.input_scale)


def _lay_out(
    values: Tensor,
    scales: Tensor,
    activations: str,
    *,
    threshold: float = float("inf"),
    input_scale: Tensor | None = None,
) -> EightBitWeight:
    outputs, inputs = values.shape
    short = (padded(outputs, ROWS) - outputs, padded(inputs, CHUNK) - inputs)
    bytes_ = torch.nn.functional.pad(values.view(torch.uint8), (0, short[1], 0, short[0]))  # zero in both kinds
    if scales.ndim == 1:
        scales = torch.nn.functional.pad(scales, (0, short[0]))
    return EightBitWeight(
        outputs=outputs,
        inputs=inputs,
        values=bytes_.contiguous().view(values.dtype),
        scales=scales.contiguous(),
        activations=activations,
        threshold=threshold,
        input_scale=None if input_scale is None else input_scale.float().reshape(1),
        tickets=torch.zeros(TICKETS, dtype=torch.int32, device=values.device),
    )
