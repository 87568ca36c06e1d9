"""compressed-tensors `float-quantized` layers: weights in float8 e4m3 with a scale per tensor, row or block.

weight        float8_e4m3fn [out, in]
weight_scale  float [1] | [out, 1] | [ceil(out / 128), ceil(in / 128)]
input_scale   float [1], only where the activations have a fixed scale

Activations are rounded to float8 as well, when the layer runs: each token with its own scale (per 128 inputs where
weights have blocks), or all of them with the layer's input_scale. Engines run fused layers (q, k, v; gate, up) with one
scale per tensor, and round again what has another one, so these share it: they are rounded as one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.errors import CannotHold, InputError
from quantkit.formats.base import (
    DTYPES,
    Format,
    Index,
    InputRounding,
    Narrowed,
    Parts,
    PartSpec,
    QuantizedWeight,
    Shape,
    check_choice,
    quotient,
    scaled,
    widen,
)
from quantkit.formats.engine_rules import TGI_CT_FLOAT8, TRT_CT, Refusal
from quantkit.formats.integer import round_scales

LARGEST = 448.0  # of float8 e4m3
BLOCK = 128


@dataclass(frozen=True)
class Float8Weight(QuantizedWeight):
    """`weight = value * scale`, the scale spread over its tensor, row or 128 x 128 block."""

    values: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float [rows, columns] of scales: [1, 1], [out, 1] or [out blocks, in blocks]
    input_scale: Tensor | None = None  # float [1]: activation = value * input_scale; None: found per token

    @property
    def shape(self) -> Shape:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.values.float() * spread(self.scales.float(), self.shape)).to(dtype)

    def cut(self, outputs: Index, inputs: Index) -> Float8Weight:
        """Blocks are counted from the first output and input, so a part must begin with one, or lie inside one."""
        scales = self.scales
        if scales.shape == (self.shape[0], 1):
            scales = scales[outputs]
        elif scales.numel() > 1:
            scales = scales[_blocks(outputs), _blocks(inputs)].contiguous()
        values = self.values.view(torch.uint8)[outputs][:, inputs].contiguous()
        return replace(self, values=values.view(self.values.dtype), scales=scales)


def _blocks(part: Index) -> slice:
    if isinstance(part, Tensor) or (part.start % BLOCK and part.start // BLOCK != (part.stop - 1) // BLOCK):
        raise InputError(f"ct-float8: a part of a weight with {BLOCK} x {BLOCK} blocks must begin where a block begins")
    return scaled(part, 1, BLOCK)


def spread(scales: Tensor, shape: Shape) -> Tensor:
    """Scales [1, 1], [out, 1] or per block -> a tensor that broadcasts against [out, in]."""
    if scales.shape[1] == 1 and scales.shape[0] in (1, shape[0]):
        return scales
    by_row = scales.repeat_interleave(BLOCK, dim=0)[: shape[0]]
    return by_row.repeat_interleave(BLOCK, dim=1)[:, : shape[1]]


def round_to_float8(values: Tensor, scales: Tensor) -> Tensor:
    """Float32 values as float8 multiples of their scales, which broadcast; too large ones become the largest."""
    return (values / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def covering_scales(largest: Tensor) -> Tensor:
    """Scales that bring magnitudes up to `largest` into float8; 1 where there is nothing to scale."""
    return quotient(largest.masked_fill(largest == 0, LARGEST), LARGEST)


def float8_by_token(inputs: Tensor) -> Tensor:
    """Inputs [..., in], each token rounded with a scale of its own and decoded back, in their own dtype."""
    values = inputs.float()
    scales = covering_scales(values.abs().amax(-1, keepdim=True))  # [..., 1]
    return (round_to_float8(values, scales).float() * scales).to(inputs.dtype)


@dataclass(frozen=True)
class CtFloat8(Format):
    """`strategy` says what shares one weight scale: the tensor, a row (channel) or a 128 x 128 block.

    `activations`: `dynamic` (a scale per token at run time), `static` (one calibrated scale per layer) or `exact` (not
    rounded at all: weights only).
    """

    name: ClassVar[str] = "ct-float8"
    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "input_scale")
    dtype_follows_model: ClassVar[bool] = True

    strategy: str = "channel"
    activations: str = "dynamic"
    dtype: str = "bfloat16"  # of the scales
    bits: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("ct-float8: strategy", self.strategy, ("tensor", "channel", "block"))
        check_choice("ct-float8: activations", self.activations, ("dynamic", "static", "exact"))
        check_choice("ct-float8: dtype", self.dtype, tuple(DTYPES))
        check_choice("ct-float8: bits", self.bits, (8,))
        if self.strategy == "block" and self.activations == "static":
            raise InputError("ct-float8: no engine serves blocks with static activations; set strategy to tensor")

    def describe(self) -> str:
        scale = "row" if self.strategy == "channel" else self.strategy
        return f"FP8 {scale}, {'weights only' if self.activations == 'exact' else self.activations}"

    @property
    def scales_tensor(self) -> bool:
        return self.strategy == "tensor"

    @property
    def input_rounding(self) -> InputRounding | None:
        return None if self.activations == "exact" else InputRounding("fp8", calibrated=self.activations == "static")

    def served_inputs(self, inputs: Tensor, quantized: QuantizedWeight | None = None) -> Tensor:
        if self.activations == "exact":
            return inputs
        values = inputs.float()
        if self.activations == "static":
            if not isinstance(quantized, Float8Weight) or quantized.input_scale is None:
                raise InputError("ct-float8 with static activations needs a weight that carries its input scale")
            scales = quantized.input_scale.to(inputs.device, torch.float32)
        elif self.strategy == "block":
            padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
            scales = covering_scales(padded.abs().amax(-1))  # [..., blocks]
            scales = scales.repeat_interleave(BLOCK, dim=-1)[..., : values.shape[-1]]
        else:
            return float8_by_token(inputs)
        return (round_to_float8(values, scales).float() * scales).to(inputs.dtype)

    def with_input_scale(self, quantized: QuantizedWeight, absmax: Tensor | float) -> QuantizedWeight:
        if self.activations != "static" or not isinstance(quantized, Float8Weight):
            return quantized
        largest = torch.as_tensor(absmax, dtype=torch.float32, device=quantized.values.device).abs().amax().view(1)
        scale = covering_scales(largest).clamp(min=torch.finfo(DTYPES[self.dtype]).tiny).to(DTYPES[self.dtype])
        if not bool(torch.isfinite(scale)):
            raise InputError(f"activations up to {float(largest):.3g} have no {self.dtype} scale; calibrate again")
        return replace(quantized, input_scale=scale)

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
        if self.activations == "static":
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
        scales = round_scales(covering_scales(largest), DTYPES[self.dtype])
        shape = (weight.shape[0], weight.shape[1])
        return Float8Weight(round_to_float8(weight.float(), spread(scales.float(), shape)), scales)

    def pack(self, quantized: QuantizedWeight) -> Parts:
        if not isinstance(quantized, Float8Weight):
            raise CannotHold("ct-float8 stores 8-bit floats only")
        scale_shape = self._scale_shape(quantized.shape)
        if quantized.scales.numel() != torch.Size(scale_shape).numel():
            raise CannotHold(
                f"ct-float8 is set to a scale per {self.strategy}, the weights have {quantized.scales.shape}"
            )
        parts = {"weight": quantized.values, "weight_scale": quantized.scales.reshape(scale_shape)}
        if self.activations == "static":
            if quantized.input_scale is None:
                raise CannotHold(
                    "ct-float8 with static activations stores an input scale, which only calibration can find; "
                    "quantize with calibration data, or set activations to dynamic"
                )
            parts["input_scale"] = quantized.input_scale
        return parts

    def unpack(self, parts: Mapping[str, Tensor]) -> Float8Weight:
        scales = parts["weight_scale"]
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
        input_scale = parts["input_scale"].reshape(1) if self.activations == "static" else None
        return Float8Weight(parts["weight"], scales, input_scale)

    def narrow(self, parts: Mapping[str, Tensor], shape: Shape, outputs: slice, inputs: slice) -> Narrowed:
        scales = parts["weight_scale"]
        if self.strategy == "block":
            outputs, inputs = widen(outputs, BLOCK, shape[0]), widen(inputs, BLOCK, shape[1])
            scales = scales[scaled(outputs, 1, BLOCK), scaled(inputs, 1, BLOCK)]
        elif scales.numel() > 1:
            scales = scales[outputs]
        narrowed = {"weight": parts["weight"][outputs, inputs], "weight_scale": scales}
        return Narrowed(dict(parts) | narrowed, outputs, inputs)

    @property
    def output_unit(self) -> int:
        return BLOCK if self.strategy == "block" else 1

    def needs_all_inputs(self, share: int) -> bool:
        """Blocks are rounded one by one; elsewhere a token's scale covers all its inputs, unless it was calibrated."""
        return bool(share % BLOCK) if self.strategy == "block" else self.activations == "dynamic"

    def refusals(self) -> Iterator[Refusal]:
        if self.strategy == "tensor" or self.activations != "dynamic":
            yield Refusal("TensorRT-LLM", "FP8 of compressed-tensors only by row or block, inputs by token", TRT_CT)
        if self.strategy == "block":
            yield Refusal("TGI", "FP8 of compressed-tensors only by row or tensor", TGI_CT_FLOAT8)
        elif self.activations == "exact":
            said = "whether it rounds the inputs of FP8 that leaves them alone was not followed"
            yield Refusal("TGI", said, TGI_CT_FLOAT8, certain=False)
