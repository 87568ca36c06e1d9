"""A layer's weight in GGUF blocks, and its format: rows of blocks, exactly as they stand in a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CannotHold, InputError
from quantkit.formats.base import (
    Dialect,
    Format,
    Index,
    Narrowed,
    Parts,
    PartSpec,
    QuantizedWeight,
    Shape,
    TensorInfo,
    check_choice,
    check_divides,
    scaled,
    widen,
)
from quantkit.formats.engine_rules import (
    LLAMA_CPP_FILES,
    OLLAMA_IMPORT,
    SGLANG_SERVE,
    TGI_GGUF,
    TRANSFORMERS_GGUF,
    VLLM_GGUF,
    EngineName,
    Refusal,
)
from quantkit.formats.gguf.blocks import Blocks, pack, unpack
from quantkit.formats.gguf.mixes import MIXES, Matrix, type_of
from quantkit.formats.gguf.search import search_blocks
from quantkit.formats.gguf.types import TYPES, BlockType

_SMALLEST_SCALE = 2.0**-17  # blocks with small scales go below float16's normal numbers: here 8 bits are left of it


@dataclass(frozen=True)
class GgufWeight(QuantizedWeight):
    """Codes with the scales of their blocks and groups, every number as the file has it (`types.py`)."""

    kind: BlockType
    codes: Tensor  # uint8 [out, in]
    scale: Tensor  # float16 [out, in / block]
    minimum: Tensor | None  # float16 [out, in / block]
    scales: Tensor | None  # int8 [out, in / group]
    mins: Tensor | None  # int8 [out, in / group]
    block: int  # inputs that share a scale: the type's size, less where a cut went through blocks
    group: int  # inputs that share a small scale; `block` where there are none

    @property
    def shape(self) -> Shape:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group_scales(self) -> Tensor:
        """float32 [out, in / group]: scale times small scale, which float32 holds exactly."""
        scale = self.scale.float()
        return scale if self.scales is None else self._by_group(scale) * self.scales.float()

    @property
    def group_lows(self) -> Tensor | None:
        """float32 [out, in / group], exact: what is added to every weight of a group. None: nothing is."""
        if self.minimum is None:
            return None
        minimum = self.minimum.float()
        return minimum if self.mins is None else -(self._by_group(minimum) * self.mins.float())

    def _by_group(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.block // self.group, 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        weight: Tensor = self._values().unflatten(1, (-1, self.group)) * self.group_scales.unsqueeze(-1)
        lows = self.group_lows
        if lows is not None:
            weight += lows.unsqueeze(-1)
        return weight.flatten(1).to(dtype)

    def _values(self) -> Tensor:
        """What codes stand for before any scale, float32 [out, in]."""
        if self.kind.table:
            return _table_on(self.codes.device, self.kind)[self.codes.int()]
        return self.codes.float() - self.kind.zero

    def divisor_limits(self) -> tuple[Tensor, Tensor]:
        """The least and the largest divisor of each row [out] with which its scales keep their precision."""
        scales = self.scale.float().abs()
        least = torch.where(scales > 0, scales, torch.inf).amin(1)
        return scales.amax(1) / torch.finfo(torch.float16).max, least / _SMALLEST_SCALE

    def divide_rows(self, divisors: Tensor) -> GgufWeight:
        """What the weight with its rows divided is on the same codes; scales are rounded to float16 once more."""
        scale, minimum = (
            None if held is None else (held.float() / divisors[:, None]).half() for held in (self.scale, self.minimum)
        )
        assert scale is not None
        return replace(self, scale=scale, minimum=minimum)

    def cut(self, outputs: Index, inputs: Index) -> GgufWeight:
        """Where a block is cut apart, every group has its scale; where a group is, smaller groups have."""
        block, group = self.block, self.group
        if isinstance(inputs, slice) and inputs.start % block == 0 and inputs.stop % block == 0:
            blocks: Index = slice(inputs.start // block, inputs.stop // block)
            groups: Index = slice(inputs.start // group, inputs.stop // group)
        else:
            unit = math.gcd(group, inputs.start, inputs.stop) if isinstance(inputs, slice) else 1
            numbers = inputs if isinstance(inputs, Tensor) else torch.arange(inputs.start, inputs.stop, unit)
            numbers = numbers.to(self.codes.device)
            blocks, groups, block, group = numbers // block, numbers // group, unit, unit

        def part(held: Tensor | None, columns: Index) -> Tensor | None:
            return None if held is None else held[outputs][:, columns].contiguous()

        return GgufWeight(
            self.kind,
            self.codes[outputs][:, inputs].contiguous(),
            self.scale[outputs][:, blocks].contiguous(),
            part(self.minimum, blocks),
            part(self.scales, groups),
            part(self.mins, groups),
            block,
            group,
        )


@cache
def table_of(kind: BlockType) -> Tensor:
    """The 16 values of a type whose codes are places in a table, float32."""
    return torch.tensor(kind.table, dtype=torch.float32)


@cache
def _table_on(device: torch.device, kind: BlockType) -> Tensor:
    """Copied once, since a CUDA graph cannot hold copies from the host."""
    return table_of(kind).to(device)


def _weight_of(held: Blocks, kind: BlockType) -> GgufWeight:
    """Blocks [out, in / block] as one weight."""
    scales, mins = (None if small is None else small.flatten(1) for small in (held.scales, held.mins))
    return GgufWeight(kind, held.codes.flatten(1), held.scale, held.minimum, scales, mins, kind.size, kind.group)


@dataclass(frozen=True)
class Gguf(Format):
    """One type of GGUF blocks; every row is a whole number of them."""

    name: ClassVar[str] = "gguf"
    suffixes: ClassVar[tuple[str, ...]] = ("weight",)
    dtype_follows_model: ClassVar[bool] = False

    kind: str = "Q8_0"
    mix: str = ""  # of llama.cpp, by which `of_matrix` chooses; then `kind` is the type of most matrices
    dtype: str = "float16"  # of the blocks' scales
    bits: int = field(init=False, default=0)  # of a code

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mix:
            check_choice("gguf: mix", self.mix, tuple(MIXES))
            object.__setattr__(self, "kind", MIXES[self.mix])
        check_choice("gguf: kind", self.kind, tuple(TYPES))
        check_choice("gguf: dtype", self.dtype, ("float16",))
        object.__setattr__(self, "bits", self.blocks.bits)

    @property
    def blocks(self) -> BlockType:
        return TYPES[self.kind]

    def of_matrix(self, matrix: Matrix) -> Gguf | None:
        """The format of one matrix; None: 16 bits, since its rows are no whole number of blocks."""
        kind = type_of(self.mix, matrix) if self.mix else self.kind
        return Gguf(kind) if kind in TYPES else None

    def describe(self) -> str:
        return self.mix or self.kind

    def check(self, shape: Shape) -> None:
        check_divides("its number of inputs", shape[1], self.blocks.size, "keep this layer, or use a type that does")

    def parts(self, shape: Shape) -> dict[str, PartSpec]:
        return {"weight": PartSpec(torch.uint8, (shape[0], shape[1] // self.blocks.size * self.blocks.nbytes))}

    def stored_shape(self, sizes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> Shape:
        out, row = sizes["weight"]
        return out, row // self.blocks.nbytes * self.blocks.size

    def quantize(self, weight: Tensor) -> GgufWeight:
        return self.search(weight)

    def search(self, weight: Tensor, importance: Tensor | None = None) -> GgufWeight:
        """Scales and codes of the least error; errors in a column count by its importance [in]."""
        return _weight_of(search_blocks(weight, self.blocks, importance), self.blocks)

    def example(self, shape: Shape) -> GgufWeight:
        return self.unpack(
            {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in self.parts(shape).items()}
        )

    def pack(self, quantized: QuantizedWeight) -> Parts:
        if not isinstance(quantized, GgufWeight) or quantized.kind != self.blocks:
            raise CannotHold(f"gguf is set to blocks of {self.kind}, which is not what the weights are")
        kind = self.blocks
        if (quantized.block, quantized.group) != (kind.size, kind.group):
            raise CannotHold(f"a weight that was cut through its blocks cannot be stored as {self.kind} again")
        small = (quantized.scales, quantized.mins)
        by_block = [None if held is None else held.unflatten(1, (-1, kind.groups)) for held in small]
        codes = quantized.codes.unflatten(1, (-1, kind.size))
        return {"weight": pack(Blocks(codes, quantized.scale, quantized.minimum, *by_block), kind).flatten(1)}

    def unpack(self, parts: Mapping[str, Tensor]) -> GgufWeight:
        kind = self.blocks
        return _weight_of(unpack(parts["weight"].unflatten(1, (-1, kind.nbytes)), kind), kind)

    def narrow(self, parts: Mapping[str, Tensor], shape: Shape, outputs: slice, inputs: slice) -> Narrowed:
        kind = self.blocks
        inputs = widen(inputs, kind.size, shape[1])
        rows = parts["weight"][outputs, scaled(inputs, kind.nbytes, kind.size)]
        return Narrowed({**parts, "weight": rows}, outputs, inputs)

    def input_unit(self, inputs: int) -> int:
        return self.blocks.group


class GgufDialect(Dialect):
    """Layers in GGUF blocks lie in a GGUF file (`quantkit/gguf_view.py`); no folder holds them."""

    quant_method: ClassVar[str] = "gguf"
    formats: ClassVar[tuple[type[Format], ...]] = (Gguf,)
    readers: ClassVar[Mapping[EngineName, str]] = {
        "transformers": TRANSFORMERS_GGUF,
        "vLLM": VLLM_GGUF,
        "SGLang": SGLANG_SERVE,
        "llama.cpp": LLAMA_CPP_FILES,
        "Ollama": OLLAMA_IMPORT,
    }
    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal("TGI", "only in an image of its own with llama.cpp inside, built by hand; use llama.cpp", TGI_GGUF),
    )
    packages: ClassVar[Mapping[EngineName, tuple[str, ...]]] = {
        "transformers": ("gguf",),  # which decodes the file
        "vLLM": ("vllm-gguf-plugin",),
    }
    serve_flags: ClassVar[Mapping[EngineName, str]] = {"SGLang": "--load-format gguf --quantization gguf"}

    def write(self, modules: Mapping[str, Format], kept: list[str]) -> dict[str, Any]:
        raise CannotHold("a folder holds no GGUF blocks")

    def read(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Format]:
        raise InputError("the config says gguf, but blocks are read from GGUF files only; give the .gguf file")
