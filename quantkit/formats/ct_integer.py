"""compressed-tensors integer layers: `pack-quantized` (2 to 8 bits) and `int-quantized` (W8A8).

    pack-quantized   weight_packed int32 [out, ceil(in * bits / 32)]       codes, packed along the inputs
                     weight_scale float [out, groups]
                     weight_zero_point int32 [ceil(out * bits / 32), groups]  only asymmetric, packed along the outputs
                     weight_shape int64 [2]
    int-quantized    weight int8 [out, in], weight_scale float [out, 1]

Codes are signed in the specification and stored with 2**(bits-1) added: the unsigned codes of GPTQ and AWQ. Packed
weights may ask for activations in float8, each token with a scale of its own: W4A8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.errors import CannotHold, InputError
from quantkit.formats.base import (
    DTYPES,
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
from quantkit.formats.bits import BLOCK, pack, packed_width, unpack
from quantkit.formats.ct_float8 import float8_by_token
from quantkit.formats.engine_rules import (
    SGLANG_CT,
    SGLANG_CT_WEIGHTS,
    TGI_CT,
    TGI_CT_WEIGHTS,
    TGI_MARLIN,
    TRT_CT,
    VLLM_CT_W4A8,
    VLLM_CT_WEIGHTS,
    Refusal,
)
from quantkit.formats.integer import MARLIN_GROUPS, IntegerFormat, IntegerWeight, middle_code


@dataclass(frozen=True)
class CtPacked(IntegerFormat):
    """Weights in 2 to 8 bits; `activations` in 16 (`exact`) or rounded to float8 by token (`fp8`, up to 4 bits)."""

    name: ClassVar[str] = "ct-packed"
    suffixes: ClassVar[tuple[str, ...]] = (
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    )
    dtype_follows_model: ClassVar[bool] = True
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4, 5, 6, 7, 8)

    dtype: str = "bfloat16"
    activations: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("ct-packed: activations", self.activations, ("exact", "fp8"))
        if self.activations == "fp8" and self.bits > 4:
            raise InputError(
                f"ct-packed: activations in fp8 are for weights of at most 4 bits, not {self.bits}; use ct-float8"
            )

    def describe(self) -> str:
        return super().describe() + (", FP8 inputs" if self.activations == "fp8" else "")

    @property
    def input_rounding(self) -> InputRounding | None:
        return InputRounding("fp8") if self.activations == "fp8" else None

    def served_inputs(self, inputs: Tensor, quantized: QuantizedWeight | None = None) -> Tensor:
        return inputs if self.activations == "exact" else float8_by_token(inputs)

    def needs_all_inputs(self, share: int) -> bool:
        return self.activations == "fp8"

    def parts(self, shape: Shape) -> dict[str, PartSpec]:
        out, inputs = shape
        groups = self.group_count(inputs)
        specs = {
            "weight_packed": PartSpec(torch.int32, (out, packed_width(inputs, self.bits))),
            "weight_scale": PartSpec(DTYPES[self.dtype], (out, groups)),
            "weight_shape": PartSpec(torch.int64, (2,)),
        }
        if not self.sym:
            specs["weight_zero_point"] = PartSpec(torch.int32, (packed_width(out, self.bits), groups))
        return specs

    def readable_parts(self, shape: Shape) -> dict[str, tuple[PartSpec, ...]]:
        """Versions up to 0.16 left bits of a word unused; act-order has been dropped since."""
        out, inputs = shape
        specs = super().readable_parts(shape) | {"weight_g_idx": (PartSpec(torch.int32, (inputs,)),)}
        specs["weight_packed"] += (PartSpec(torch.int32, (out, self._padded_width(inputs))),)
        if not self.sym:
            groups = self.group_count(inputs)
            specs["weight_zero_point"] += (PartSpec(torch.int32, (self._padded_width(out), groups)),)
        return specs

    def _padded_width(self, count: int) -> int:
        return -(-count // (32 // self.bits))

    def stored_shape(self, sizes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> Shape:
        out, inputs = (int(size) for size in read("weight_shape"))
        return out, inputs

    def pack(self, quantized: QuantizedWeight) -> Parts:
        weight = self.require_integer(quantized)
        if weight.group_of is not None:
            raise CannotHold("compressed-tensors dropped scattered groups (act-order); keep this checkpoint in gptq")
        parts = {
            "weight_packed": pack(weight.codes, self.bits),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }
        if not self.sym:
            parts["weight_zero_point"] = pack(weight.zeros.mT, self.bits).mT.contiguous()
        return parts

    def unpack(self, parts: Mapping[str, Tensor]) -> IntegerWeight:
        out, inputs = (int(size) for size in parts["weight_shape"])
        scales = parts["weight_scale"]
        codes = self._unpack_words(parts["weight_packed"], inputs)
        if not self.sym:
            zeros = self._unpack_words(parts["weight_zero_point"].mT, out).mT.contiguous()
        else:
            zeros = torch.full_like(scales, middle_code(self.bits), dtype=torch.uint8)
        return IntegerWeight(codes, scales, zeros, self.bits, self.group_width(inputs), parts.get("weight_g_idx"))

    def narrow(self, parts: Mapping[str, Tensor], shape: Shape, outputs: slice, inputs: slice) -> Narrowed:
        """Words that are not dense, and groups that are scattered, are taken as a whole."""
        packed, zeros = parts["weight_packed"], parts.get("weight_zero_point")
        narrowed, words = dict(parts), slice(None)
        if "weight_g_idx" in parts or packed.shape[1] != packed_width(shape[1], self.bits):
            inputs = slice(0, shape[1])
        else:
            inputs = widen(inputs, math.lcm(BLOCK, self.input_unit(shape[1])), shape[1])
            words = scaled(inputs, self.bits, 32)
        groups = scaled(inputs, 1, self.group_width(shape[1]))
        if zeros is not None and zeros.shape[0] == packed_width(shape[0], self.bits):
            outputs = widen(outputs, BLOCK, shape[0])
            narrowed["weight_zero_point"] = zeros[scaled(outputs, self.bits, 32), groups]
        elif zeros is not None:
            outputs = slice(0, shape[0])
            narrowed["weight_zero_point"] = zeros[:, groups]
        narrowed |= {
            "weight_packed": packed[outputs, words],
            "weight_scale": parts["weight_scale"][outputs, groups],
            "weight_shape": torch.tensor([outputs.stop - outputs.start, inputs.stop - inputs.start]),
        }
        return Narrowed(narrowed, outputs, inputs)

    def scattered_groups(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        return parts.get("weight_g_idx")

    def refusals(self) -> Iterator[Refusal]:
        if not self.sym and self.bits not in (4, 8):
            said = f"asymmetric compressed-tensors only at 4 or 8 bits, not {self.bits}"
            yield Refusal("vLLM", said, VLLM_CT_WEIGHTS)
        if self.bits not in (4, 8):
            said = f"compressed-tensors weights only at 4 or 8 bits, not {self.bits}"
            yield Refusal("SGLang", said, SGLANG_CT_WEIGHTS)
            yield Refusal("TGI", said, TGI_CT)
        if not self.sym:
            yield Refusal("TGI", "looks for the zero points of compressed-tensors under GPTQ's name", TGI_CT_WEIGHTS)
        if self.group_size not in MARLIN_GROUPS:
            said = f"groups of 32, 64, 128 or a whole row only, not {self.group_size}"
            yield Refusal("TGI", said, TGI_MARLIN)
        if self.activations == "fp8":
            yield from self._refusals_of_float8()
        said = "reads FP8 and FP4 of compressed-tensors, no integers; use the recipe fp8"
        yield Refusal("TensorRT-LLM", said, TRT_CT)

    def _refusals_of_float8(self) -> Iterator[Refusal]:
        if (self.bits, self.group_size, self.sym) != (4, 128, True):
            said = "inputs in FP8 only for symmetric 4 bits in groups of 128"
            yield Refusal("vLLM", said, VLLM_CT_W4A8)
        said = "inputs in FP8 beside packed integers were not followed in its sources"
        yield Refusal("SGLang", said, SGLANG_CT, certain=False)
        yield Refusal("TGI", said, TGI_CT, certain=False)

    def _unpack_words(self, words: Tensor, count: int) -> Tensor:
        """Versions up to 0.16 left the top bits of each word unused at widths that do not divide 32."""
        if words.shape[-1] == packed_width(count, self.bits):
            return unpack(words, self.bits, count)
        shifts = torch.arange(32 // self.bits, device=words.device, dtype=torch.int32) * self.bits
        values = (words.unsqueeze(-1) >> shifts) & ((1 << self.bits) - 1)
        return values.flatten(-2)[..., :count].to(torch.uint8)


@dataclass(frozen=True)
class CtInt8(IntegerFormat):
    """Weights and activations in 8 bits: one scale per output row, activations quantized per token at run time."""

    name: ClassVar[str] = "ct-int8"
    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "input_scale", "input_zero_point")
    dtype_follows_model: ClassVar[bool] = True
    allowed_bits: ClassVar[tuple[int, ...]] = (8,)

    bits: int = 8
    group_size: int = -1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size != -1 or not self.sym:
            raise InputError("ct-int8 has one symmetric scale per row: group_size must be -1 and sym true")

    def describe(self) -> str:
        return "W8A8 row, dynamic"

    @property
    def input_rounding(self) -> InputRounding:
        return InputRounding("int8")

    def served_inputs(self, inputs: Tensor, quantized: QuantizedWeight | None = None) -> Tensor:
        """One symmetric scale per token, as compressed-tensors computes it."""
        values = inputs.float()
        absmax = values.abs().amax(-1, keepdim=True)  # [..., 1]
        scales = quotient(absmax.masked_fill(absmax == 0, 1), 127.5)
        codes = torch.round((values / scales).clamp_(-128, 127))
        return (codes * scales).to(inputs.dtype)

    def parts(self, shape: Shape) -> dict[str, PartSpec]:
        return {
            "weight": PartSpec(torch.int8, shape),
            "weight_scale": PartSpec(DTYPES[self.dtype], (shape[0], 1)),
        }

    def pack(self, quantized: QuantizedWeight) -> Parts:
        weight = self.require_integer(quantized)
        signed = (weight.codes ^ 128).view(torch.int8)  # unsigned code - 128, in two's complement
        return {"weight": signed, "weight_scale": weight.scales}

    def unpack(self, parts: Mapping[str, Tensor]) -> IntegerWeight:
        codes = parts["weight"].view(torch.uint8) ^ 128
        scales = parts["weight_scale"].reshape(-1, 1).expand(codes.shape[0], 1).contiguous()
        zeros = torch.full_like(scales, 128, dtype=torch.uint8)
        return IntegerWeight(codes, scales, zeros, 8, codes.shape[1])

    def narrow(self, parts: Mapping[str, Tensor], shape: Shape, outputs: slice, inputs: slice) -> Narrowed:
        scales = parts["weight_scale"]
        narrowed = {
            "weight": parts["weight"][outputs, inputs],
            "weight_scale": scales if scales.numel() == 1 else scales[outputs],
        }
        return Narrowed(dict(parts) | narrowed, outputs, inputs)

    def needs_all_inputs(self, share: int) -> bool:
        return True

    def refusals(self) -> Iterator[Refusal]:
        yield Refusal("TensorRT-LLM", "takes 8 bits of compressed-tensors for FP8, whatever their type", TRT_CT)
