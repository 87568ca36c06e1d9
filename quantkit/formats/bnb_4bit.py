"""bitsandbytes 4-bit layers: NF4 and FP4, with and without double quantization.

weight                                 uint8 [ceil(n / 2), 1]  two codes a byte, the earlier one in the high half
weight.absmax                          float32 [blocks], or uint8 [blocks] under double quantization
weight.quant_map                       float32 [16]
weight.nested_absmax, .nested_quant_map  float32, only under double quantization
weight.quant_state.bitsandbytes__nf4   uint8, a JSON text: shape, block size, dtype, offset of the nested scales
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CannotHold, StorageError
from quantkit.formats.base import (
    ANY_LENGTH,
    DTYPES,
    Format,
    Narrowed,
    Parts,
    PartSpec,
    QuantizedWeight,
    Shape,
    check_choice,
    scaled,
    widen,
)
from quantkit.formats.codebook import (
    NESTED_BLOCK,
    CodebookWeight,
    NestedScales,
    cut_scales,
    nearest,
    quantize_codebook,
    table_of,
)

STATE = "weight.quant_state.bitsandbytes__"
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_STORAGE = (torch.int8, torch.bool, torch.bfloat16, torch.float16, torch.float32)  # of codes, beside uint8


@dataclass(frozen=True)
class Bnb4Bit(Format):
    """The shared half of `Nf4` and `Fp4`. `dtype` is what the weight decodes to in bitsandbytes."""

    kind: ClassVar[str]
    dtype_follows_model: ClassVar[bool] = True

    block: int = 64
    double_quant: bool = True
    dtype: str = "bfloat16"
    bits: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: block", self.block, BLOCK_SIZES)
        check_choice(f"{self.name}: dtype", self.dtype, tuple(DTYPES))
        check_choice(f"{self.name}: bits", self.bits, (4,))

    def describe(self) -> str:
        return f"{self.kind.upper()} b{self.block}" + (" double-quant" if self.double_quant else "")

    def check(self, shape: Shape) -> None:
        """Any shape will do."""

    def parts(self, shape: Shape) -> dict[str, PartSpec]:
        count = shape[0] * shape[1]
        blocks = -(-count // self.block)
        specs = {
            "weight": PartSpec(torch.uint8, (-(-count // 2), 1)),
            "weight.absmax": PartSpec(torch.uint8 if self.double_quant else torch.float32, (blocks,)),
            "weight.quant_map": PartSpec(torch.float32, (16,)),
            STATE + self.kind: PartSpec(torch.uint8, (ANY_LENGTH,)),
        }
        if self.double_quant:
            specs["weight.nested_absmax"] = PartSpec(torch.float32, (-(-blocks // NESTED_BLOCK),))
            specs["weight.nested_quant_map"] = PartSpec(torch.float32, (256,))
        return specs

    def readable_parts(self, shape: Shape) -> dict[str, tuple[PartSpec, ...]]:
        """Other storage dtypes hold the same bytes."""
        specs = super().readable_parts(shape)
        count = specs["weight"][0].shape[0]
        specs["weight"] += tuple(PartSpec(dtype, (-(-count // dtype.itemsize), 1)) for dtype in _STORAGE)
        return specs

    def stored_shape(self, sizes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> Shape:
        out, inputs = read_state(read(STATE + self.kind))["shape"]
        return out, inputs

    def quantize(self, weight: Tensor) -> CodebookWeight:
        return quantize_codebook(weight, self.kind, self.block, self.double_quant)

    def pack(self, quantized: QuantizedWeight) -> Parts:
        weight = self._require_codebook(quantized)
        filler = int(nearest(torch.zeros(1), table_of(self.kind)))  # bitsandbytes ends an odd count with a zero weight
        pairs = torch.nn.functional.pad(weight.codes, (0, weight.codes.numel() % 2), value=filler).view(-1, 2)
        state: dict[str, Any] = {
            "quant_type": self.kind,
            "blocksize": weight.block,
            "dtype": self.dtype,
            "shape": list(weight.shape),
        }
        parts = {
            "weight": ((pairs[:, 0] << 4) | pairs[:, 1]).unsqueeze(1),
            "weight.quant_map": table_of(self.kind).clone(),
        }
        if isinstance(weight.absmax, NestedScales):
            nested = weight.absmax
            parts["weight.absmax"] = nested.codes
            parts["weight.nested_absmax"] = nested.scales
            parts["weight.nested_quant_map"] = nested.table.clone()
            state |= {"nested_blocksize": nested.block, "nested_dtype": "float32", "nested_offset": nested.offset}
        else:
            parts["weight.absmax"] = weight.block_scales
        parts[STATE + self.kind] = _state_part(state)
        return parts

    def _require_codebook(self, quantized: QuantizedWeight) -> CodebookWeight:
        if not isinstance(quantized, CodebookWeight) or quantized.kind != self.kind:
            raise CannotHold(f"{self.name} stores codes of the {self.kind} table only")
        if quantized.block != self.block:
            raise CannotHold(f"{self.name} is set to blocks of {self.block}, the weights have {quantized.block}")
        nested = isinstance(quantized.absmax, NestedScales)
        if self.double_quant and not nested:
            raise CannotHold(f"{self.name}: quantizing the block scales a second time would change the weights")
        if nested and not self.double_quant:
            return CodebookWeight(self.kind, quantized.codes, quantized.block_scales, quantized.block, quantized.shape)
        return quantized

    def unpack(self, parts: Mapping[str, Tensor]) -> CodebookWeight:
        state = read_state(parts[STATE + self.kind])
        out, inputs = state["shape"]
        packed = _bytes(parts["weight"])
        codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[: out * inputs]
        blocks = -(-out * inputs // state["blocksize"])
        if parts["weight.absmax"].numel() != blocks:
            raise ValueError(f"its quant_state says {blocks} blocks, but there are {parts['weight.absmax'].numel()}")
        return CodebookWeight(self.kind, codes, _block_scales(parts, state), state["blocksize"], (out, inputs))

    def narrow(self, parts: Mapping[str, Tensor], shape: Shape, outputs: slice, inputs: slice) -> Narrowed:
        state = read_state(parts[STATE + self.kind])
        block = state["blocksize"]
        if shape[1] % block:  # blocks go across the ends of rows
            return super().narrow(parts, shape, outputs, inputs)
        inputs = widen(inputs, block, shape[1])
        rows = _bytes(parts["weight"]).view(shape[0], shape[1] // 2)
        scales = cut_scales(
            _block_scales(parts, state), (shape[0], shape[1] // block), outputs, scaled(inputs, 1, block)
        )
        state["shape"] = [outputs.stop - outputs.start, inputs.stop - inputs.start]
        narrowed = dict(parts) | {"weight": rows[outputs, scaled(inputs, 1, 2)].reshape(-1, 1)}
        if isinstance(scales, NestedScales):
            state["nested_blocksize"] = scales.block
            narrowed |= {"weight.absmax": scales.codes, "weight.nested_absmax": scales.scales}
        elif isinstance(scales, Tensor):
            narrowed["weight.absmax"] = scales
        return Narrowed(narrowed | {STATE + self.kind: _state_part(state)}, outputs, inputs)

    def input_unit(self, inputs: int) -> int:
        return self.block


def _bytes(weight: Tensor) -> Tensor:
    """Other storage dtypes hold the same bytes."""
    return weight.contiguous().view(torch.uint8).flatten()


def _block_scales(parts: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor | NestedScales:
    if "weight.nested_absmax" not in parts:
        return parts["weight.absmax"]
    return NestedScales(
        parts["weight.absmax"],
        parts["weight.nested_absmax"].float(),
        state["nested_offset"],
        parts["weight.nested_quant_map"].float(),
        state["nested_blocksize"],
    )


def _state_part(state: Mapping[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def read_state(text: Tensor) -> dict[str, Any]:
    """The JSON text that bitsandbytes keeps in a tensor."""
    try:
        state = json.loads(bytes(text.tolist()))
        return dict(state, shape=[int(size) for size in state["shape"]])
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"a bitsandbytes quant_state is not readable ({error}); the checkpoint is damaged"
        ) from error


@dataclass(frozen=True)
class Nf4(Bnb4Bit):
    name: ClassVar[str] = "nf4"
    kind: ClassVar[str] = "nf4"
    suffixes: ClassVar[tuple[str, ...]] = (
        *("weight", "weight.absmax", "weight.quant_map"),
        *("weight.nested_absmax", "weight.nested_quant_map", STATE + "nf4"),
    )


@dataclass(frozen=True)
class Fp4(Bnb4Bit):
    name: ClassVar[str] = "fp4"
    kind: ClassVar[str] = "fp4"
    suffixes: ClassVar[tuple[str, ...]] = (*Nf4.suffixes[:-1], STATE + "fp4")
