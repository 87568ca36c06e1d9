"""NVFP4 layers as compressed-tensors stores them (`nvfp4-pack-quantized`): 4-bit floats with small scales.

    weight_packed        uint8 [out, in / 2]           two codes (`e2m1.py`) a byte, the earlier one in the low half
    weight_scale         float8_e4m3fn [out, in / 16]
    weight_global_scale  float32 [1]                   weight = code * weight_scale / weight_global_scale

Inputs stay in 16 bits, also where a checkpoint brings an input_global_scale to round them with. vLLM runs fused layers
(q, k, v; gate, up) with one global scale, the largest of theirs, so they must have the same: they are rounded as one
matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.errors import CannotHold
from quantkit.formats.base import (
    Format,
    Narrowed,
    Parts,
    PartSpec,
    QuantizedWeight,
    Shape,
    check_choice,
    check_divides,
    scaled,
    widen,
)
from quantkit.formats.codebook import CodebookWeight, DividedScales
from quantkit.formats.e2m1 import KIND, NV_BLOCK, WEIGHTS_ALONE, pack_codes, quantize_nvfp4, unpack_codes
from quantkit.formats.engine_rules import TRT_CT, Refusal


@dataclass(frozen=True)
class CtNvfp4(Format):
    """Weights in 4-bit floats, activations in 16 bits."""

    name: ClassVar[str] = "ct-nvfp4"
    suffixes: ClassVar[tuple[str, ...]] = (
        *("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    )
    dtype_follows_model: ClassVar[bool] = True

    dtype: str = "bfloat16"  # of the model; nothing here is stored in it
    bits: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("ct-nvfp4: bits", self.bits, (4,))

    @property
    def scales_tensor(self) -> bool:
        return True

    def describe(self) -> str:
        return "NVFP4 b16"

    def check(self, shape: Shape) -> None:
        check_divides("its number of inputs", shape[1], NV_BLOCK, "keep this layer, or use nf4, which takes any")

    def parts(self, shape: Shape) -> dict[str, PartSpec]:
        return {
            "weight_packed": PartSpec(torch.uint8, (shape[0], shape[1] // 2)),
            "weight_scale": PartSpec(torch.float8_e4m3fn, (shape[0], shape[1] // NV_BLOCK)),
            "weight_global_scale": PartSpec(torch.float32, (1,)),
        }

    def stored_shape(self, sizes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> Shape:
        out, pairs = sizes["weight_packed"]
        return out, 2 * pairs

    def quantize(self, weight: Tensor) -> CodebookWeight:
        return quantize_nvfp4(weight)

    def pack(self, quantized: QuantizedWeight) -> Parts:
        if not isinstance(quantized, CodebookWeight) or not isinstance(quantized.absmax, DividedScales):
            raise CannotHold(f"ct-nvfp4 stores codes of the {KIND} table with 8-bit scales only")
        out, inputs = quantized.shape
        scales = quantized.absmax
        return {
            "weight_packed": pack_codes(quantized.codes.view(out, inputs)),
            "weight_scale": scales.values.view(out, inputs // NV_BLOCK),
            "weight_global_scale": scales.divisor,
        }

    def unpack(self, parts: Mapping[str, Tensor]) -> CodebookWeight:
        codes, values = unpack_codes(parts["weight_packed"]), parts["weight_scale"]
        scales = DividedScales(values.flatten(), parts["weight_global_scale"].float().view(1))
        return CodebookWeight(KIND, codes.flatten(), scales, NV_BLOCK, (codes.shape[0], codes.shape[1]))

    def narrow(self, parts: Mapping[str, Tensor], shape: Shape, outputs: slice, inputs: slice) -> Narrowed:
        inputs = widen(inputs, NV_BLOCK, shape[1])
        narrowed = {
            "weight_packed": parts["weight_packed"][outputs, scaled(inputs, 1, 2)],
            "weight_scale": parts["weight_scale"][outputs, scaled(inputs, 1, NV_BLOCK)],
        }
        return Narrowed(dict(parts) | narrowed, outputs, inputs)

    def refusals(self) -> Iterator[Refusal]:
        yield from WEIGHTS_ALONE
        yield Refusal("TensorRT-LLM", "NVFP4 only where activations have 4 bits too", TRT_CT)

    def input_unit(self, inputs: int) -> int:
        return NV_BLOCK
