"""MXFP4 layers: 4-bit floats (`e2m1.py`) with a power of two for every 32 inputs, in two layouts with the same bytes.

    compressed-tensors   weight_packed uint8 [out, in / 2]       two codes a byte, the earlier one in the low half
                         weight_scale  uint8 [out, in / 32]      E8M0: 2**(byte - 127)
    gpt-oss              blocks        uint8 [out, in / 32, 16]
                         scales        uint8 [out, in / 32]

gpt-oss keeps all experts of a layer in one tensor, `experts.gate_up_proj_blocks` and so on; `Checkpoint` presents them
one by one, under the names above.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CannotHold, InputError
from quantkit.formats.base import (
    Dialect,
    Format,
    Narrowed,
    Parts,
    PartSpec,
    QuantizedWeight,
    Shape,
    TensorInfo,
    check_choice,
    check_divides,
    modules_with,
    scaled,
    widen,
)
from quantkit.formats.codebook import CodebookWeight
from quantkit.formats.e2m1 import KIND, MX_BLOCK, WEIGHTS_ALONE, pack_codes, power_table, quantize_mxfp4, unpack_codes
from quantkit.formats.engine_rules import (
    SGLANG_MXFP4,
    TRANSFORMERS_MXFP4,
    TRT_CONFIG,
    TRT_CT,
    VLLM_MXFP4,
    EngineName,
    Refusal,
)

_EXPONENT = 7  # where the exponent of a bfloat16 begins


@dataclass(frozen=True)
class Mxfp4(Format):
    """What the two layouts share."""

    dtype_follows_model: ClassVar[bool] = True
    codes_name: ClassVar[str]
    scales_name: ClassVar[str]

    dtype: str = "bfloat16"  # of the model; nothing here is stored in it
    bits: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: bits", self.bits, (4,))

    def describe(self) -> str:
        return "MXFP4 b32"

    def check(self, shape: Shape) -> None:
        check_divides("its number of inputs", shape[1], MX_BLOCK, "keep this layer, or use nf4, which takes any")

    @abstractmethod
    def codes_shape(self, shape: Shape) -> tuple[int, ...]:
        """Of the packed codes."""

    def parts(self, shape: Shape) -> dict[str, PartSpec]:
        return {
            self.codes_name: PartSpec(torch.uint8, self.codes_shape(shape)),
            self.scales_name: PartSpec(torch.uint8, (shape[0], shape[1] // MX_BLOCK)),
        }

    def stored_shape(self, sizes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> Shape:
        out, blocks = sizes[self.scales_name]
        return out, blocks * MX_BLOCK

    def quantize(self, weight: Tensor) -> CodebookWeight:
        return quantize_mxfp4(weight)

    def pack(self, quantized: QuantizedWeight) -> Parts:
        if not isinstance(quantized, CodebookWeight) or quantized.kind != KIND or quantized.block != MX_BLOCK:
            raise CannotHold(f"{self.name} stores codes of the {KIND} table in blocks of {MX_BLOCK} only")
        scales = quantized.block_scales
        if scales.dtype != torch.bfloat16:
            raise CannotHold(f"{self.name} stores scales that are powers of two only")
        out, inputs = quantized.shape
        return {
            self.codes_name: pack_codes(quantized.codes.view(out, inputs)).view(self.codes_shape(quantized.shape)),
            self.scales_name: _bytes_of(scales).view(out, inputs // MX_BLOCK),
        }

    def unpack(self, parts: Mapping[str, Tensor]) -> CodebookWeight:
        codes, bytes_ = parts[self.codes_name], parts[self.scales_name]
        scales = power_table().to(bytes_.device)[bytes_.int()]
        shape = (bytes_.shape[0], bytes_.shape[1] * MX_BLOCK)
        return CodebookWeight(
            KIND, unpack_codes(codes.reshape(shape[0], -1)).flatten(), scales.flatten(), MX_BLOCK, shape
        )

    def narrow(self, parts: Mapping[str, Tensor], shape: Shape, outputs: slice, inputs: slice) -> Narrowed:
        inputs = widen(inputs, MX_BLOCK, shape[1])
        blocks = scaled(inputs, 1, MX_BLOCK)
        codes = parts[self.codes_name]
        within = blocks if codes.ndim == 3 else scaled(inputs, 1, 2)
        narrowed = {
            self.codes_name: codes[outputs, within],
            self.scales_name: parts[self.scales_name][outputs, blocks],
        }
        return Narrowed(dict(parts) | narrowed, outputs, inputs)

    def input_unit(self, inputs: int) -> int:
        return MX_BLOCK


def _bytes_of(scales: Tensor) -> Tensor:
    """E8M0 of powers of two in bfloat16: their exponent as it stands; 2**-127 is below its range, and is byte 0."""
    return (scales.contiguous().view(torch.int16) >> _EXPONENT).to(torch.uint8)


@dataclass(frozen=True)
class CtMxfp4(Mxfp4):
    """compressed-tensors' `mxfp4-pack-quantized`, inputs in 16 bits."""

    name: ClassVar[str] = "ct-mxfp4"
    suffixes: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")
    codes_name: ClassVar[str] = "weight_packed"
    scales_name: ClassVar[str] = "weight_scale"

    def codes_shape(self, shape: Shape) -> tuple[int, ...]:
        return shape[0], shape[1] // 2

    def refusals(self) -> Iterator[Refusal]:
        yield from WEIGHTS_ALONE
        said = "its reader takes MXFP4 of compressed-tensors; whether dense layers have a kernel was not followed"
        yield Refusal("TensorRT-LLM", said, TRT_CT, certain=False)


@dataclass(frozen=True)
class BlockMxfp4(Mxfp4):
    """The layout of gpt-oss, of one expert."""

    name: ClassVar[str] = "mxfp4"
    suffixes: ClassVar[tuple[str, ...]] = ("blocks", "scales")
    codes_name: ClassVar[str] = "blocks"
    scales_name: ClassVar[str] = "scales"

    def codes_shape(self, shape: Shape) -> tuple[int, ...]:
        return shape[0], shape[1] // MX_BLOCK, MX_BLOCK // 2


class Mxfp4Dialect(Dialect):
    """`quant_method: mxfp4`, as gpt-oss is published: experts only."""

    quant_method: ClassVar[str] = "mxfp4"
    formats: ClassVar[tuple[type[Format], ...]] = (BlockMxfp4,)
    readers: ClassVar[Mapping[EngineName, str]] = {
        "transformers": TRANSFORMERS_MXFP4,
        "vLLM": VLLM_MXFP4,
        "SGLang": SGLANG_MXFP4,
        "TensorRT-LLM": TRT_CONFIG,
    }

    def write(self, modules: Mapping[str, Format], kept: list[str]) -> dict[str, Any]:
        raise CannotHold(
            "gpt-oss's own layout is read, but not written; use the format ct-mxfp4, which has the same codes"
        )

    def read(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Format]:
        modules: dict[str, Format] = dict.fromkeys(modules_with("blocks", tensors), BlockMxfp4())
        if not modules:
            raise InputError("the config says mxfp4, but no tensor is quantized; get the checkpoint again")
        return modules
