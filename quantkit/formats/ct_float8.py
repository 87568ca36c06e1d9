"""compressed-tensors `float-quantized` layers: weights in float8 e4m3 with a scale per tensor, row or block.

weight        float8_e4m3fn [out, in]
weight_scale  float [1] | [out, 1] | [ceil(out / 128), ceil(in / 128)]
input_scale   float [1], only where the activations have a fixed scale
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.errors import CannotHold
from quantkit.formats.base import DTYPES, Format, Parts, PartSpec, QuantizedWeight, Shape, check_choice
from quantkit.formats.integer import round_scales

LARGEST = 448.0  # of float8 e4m3
BLOCK = 128


@dataclass(frozen=True)
class Float8Weight(QuantizedWeight):
    """`weight = value * scale`, the scale spread over its tensor, row or 128 x 128 block."""

    values: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float [rows, columns] of scales: [1, 1], [out, 1] or [out blocks, in blocks]
    input_scale: Tensor | None = None

    @property
    def shape(self) -> Shape:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.values.float() * spread(self.scales.float(), self.shape)).to(dtype)


def spread(scales: Tensor, shape: Shape) -> Tensor:
    """Scales [1, 1], [out, 1] or per block -> a tensor that broadcasts against [out, in]."""
    if scales.shape[1] == 1 and scales.shape[0] in (1, shape[0]):
        return scales
    by_row = scales.repeat_interleave(BLOCK, dim=0)[: shape[0]]
    return by_row.repeat_interleave(BLOCK, dim=1)[:, : shape[1]]


@dataclass(frozen=True)
class CtFloat8(Format):
    """`static_input` marks activations quantized with a calibrated scale instead of one per token."""

    name: ClassVar[str] = "ct-float8"
    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "input_scale")
    dtype_follows_model: ClassVar[bool] = True

    strategy: str = "channel"
    static_input: bool = False
    dtype: str = "bfloat16"  # of the scales
    bits: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("ct-float8: strategy", self.strategy, ("tensor", "channel", "block"))
        check_choice("ct-float8: dtype", self.dtype, tuple(DTYPES))
        check_choice("ct-float8: bits", self.bits, (8,))

    def describe(self) -> str:
        scale = "row" if self.strategy == "channel" else self.strategy
        return f"FP8 {scale}, {'static' if self.static_input else 'dynamic'}"

    def check(self, shape: Shape) -> None:
        """Any shape will do."""

    def _scale_shape(self, shape: Shape) -> tuple[int, ...]:
        if self.strategy == "tensor":
            return (1,)
        return (shape[0], 1) if self.strategy == "channel" else (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))

    def parts(self, shape: Shape) -> dict[str, PartSpec]:
        specs = {
            "weight": PartSpec(torch.float8_e4m3fn, shape),
            "weight_scale": PartSpec(DTYPES[self.dtype], self._scale_shape(shape)),
        }
        if self.static_input:
            specs["input_scale"] = PartSpec(DTYPES[self.dtype], (1,))
        return specs

    def quantize(self, weight: Tensor) -> Float8Weight:
        magnitude = weight.float().abs()
        if self.strategy == "tensor":
            largest = magnitude.amax().view(1, 1)
        elif self.strategy == "channel":
            largest = magnitude.amax(-1, keepdim=True)
        else:
            out, inputs = weight.shape
            padded = torch.nn.functional.pad(magnitude, (0, -inputs % BLOCK, 0, -out % BLOCK))
            largest = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax(dim=(1, 3))
        scales = round_scales(largest.masked_fill(largest == 0, LARGEST) / LARGEST, DTYPES[self.dtype])
        shape = (weight.shape[0], weight.shape[1])
        values = (weight.float() / spread(scales.float(), shape)).clamp_(-LARGEST, LARGEST)
        return Float8Weight(values.to(torch.float8_e4m3fn), scales)

    def pack(self, quantized: QuantizedWeight) -> Parts:
        if not isinstance(quantized, Float8Weight):
            raise CannotHold("ct-float8 stores 8-bit floats only")
        scale_shape = self._scale_shape(quantized.shape)
        if quantized.scales.numel() != torch.Size(scale_shape).numel():
            raise CannotHold(
                f"ct-float8 is set to a scale per {self.strategy}, the weights have {quantized.scales.shape}"
            )
        parts = {"weight": quantized.values, "weight_scale": quantized.scales.reshape(scale_shape)}
        if self.static_input:
            if quantized.input_scale is None:
                raise CannotHold("ct-float8 with static_input needs a calibrated activation scale")
            parts["input_scale"] = quantized.input_scale
        return parts

    def unpack(self, parts: Mapping[str, Tensor]) -> Float8Weight:
        scales = parts["weight_scale"]
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
        return Float8Weight(parts["weight"], scales, parts.get("input_scale"))
