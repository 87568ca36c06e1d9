"""AWQ checkpoints in the GEMM layout (`quant_method: awq`), as written by AutoAWQ and GPTQModel.

    qweight int32 [in, out / 8]          codes, packed along the outputs, eight per word in AWQ's own order
    qzeros  int32 [in / group, out / 8]  zero points, packed alike, as they are
    scales  float [in / group, out]

The activation-aware scaling itself leaves no tensor: it is folded into the layers before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantkit.errors import CannotHold, InputError
from quantkit.formats.base import (
    DTYPES,
    Dialect,
    Format,
    Narrowed,
    Parts,
    PartSpec,
    QuantizedWeight,
    Shape,
    TensorInfo,
    check_divides,
    modules_with,
    scaled,
    stored_dtype,
    widen,
)
from quantkit.formats.bits import pack, unpack
from quantkit.formats.engine_rules import (
    SGLANG_AWQ,
    TGI_MARLIN,
    TRANSFORMERS_AWQ,
    TRT_CONFIG,
    TRT_READS_ITS_OWN,
    VLLM_MARLIN,
    EngineName,
    Refusal,
    leaves_experts_out,
)
from quantkit.formats.integer import MARLIN_GROUPS, IntegerFormat, IntegerWeight, middle_code, refused_groups

NIBBLE_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds this one of its eight columns
COLUMN_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # the inverse


def _reorder(values: Tensor, order: tuple[int, ...]) -> Tensor:
    columns: Tensor = values.unflatten(-1, (-1, 8))[..., list(order)]
    return columns.flatten(-2)


def _pack_columns(values: Tensor) -> Tensor:
    return pack(_reorder(values, NIBBLE_COLUMN), 4)


def _unpack_columns(words: Tensor) -> Tensor:
    return _reorder(unpack(words, 4, words.shape[-1] * 8), COLUMN_NIBBLE)


@dataclass(frozen=True)
class Awq(IntegerFormat):
    """Four bits only. Symmetric weights are written with a zero point of 8 everywhere.

    The config then says that there are zero points, and headers do not tell that they are all 8: such a folder reads
    back with `sym` false, to the same weights. Kernels and `convert` look at the zero points themselves.
    """

    name: ClassVar[str] = "awq"
    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    dtype_follows_model: ClassVar[bool] = False
    allowed_bits: ClassVar[tuple[int, ...]] = (4,)

    sym: bool = False

    def check(self, shape: Shape) -> None:
        super().check(shape)
        check_divides("awq: the layer's output size", shape[0], 8, "keep this layer or use compressed-tensors")

    def parts(self, shape: Shape) -> dict[str, PartSpec]:
        out, inputs = shape
        groups = self.group_count(inputs)
        return {
            "qweight": PartSpec(torch.int32, (inputs, out // 8)),
            "qzeros": PartSpec(torch.int32, (groups, out // 8)),
            "scales": PartSpec(DTYPES[self.dtype], (groups, out)),
        }

    def stored_shape(self, sizes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> Shape:
        return sizes["qweight"][1] * 8, sizes["qweight"][0]

    def pack(self, quantized: QuantizedWeight) -> Parts:
        weight = self.require_integer(quantized)
        self.check(weight.shape)
        if weight.group_of is not None:
            raise CannotHold("awq has no place for scattered groups (act-order)")
        return {
            "qweight": _pack_columns(weight.codes.mT),
            "qzeros": _pack_columns(weight.zeros.mT),
            "scales": weight.scales.mT.contiguous(),
        }

    def unpack(self, parts: Mapping[str, Tensor]) -> IntegerWeight:
        codes = _unpack_columns(parts["qweight"]).mT.contiguous()
        zeros = _unpack_columns(parts["qzeros"]).mT.contiguous()
        return IntegerWeight(codes, parts["scales"].mT.contiguous(), zeros, 4, self.group_width(codes.shape[1]))

    def stores_symmetric(self, qzeros: Tensor) -> bool:
        """Whether the zero points of a layer are all the middle; of the layer's parts no other is needed."""
        return bool((_unpack_columns(qzeros) == middle_code(4)).all())

    def narrow(self, parts: Mapping[str, Tensor], shape: Shape, outputs: slice, inputs: slice) -> Narrowed:
        inputs, outputs = widen(inputs, self.input_unit(shape[1]), shape[1]), widen(outputs, 8, shape[0])
        groups, words = scaled(inputs, 1, self.group_width(shape[1])), scaled(outputs, 1, 8)
        narrowed = {
            "qweight": parts["qweight"][inputs, words],
            "qzeros": parts["qzeros"][groups, words],
            "scales": parts["scales"][groups, outputs],
        }
        return Narrowed(narrowed, outputs, inputs)

    def refusals(self) -> Iterator[Refusal]:
        yield from refused_groups(self.group_size)
        if self.group_size not in MARLIN_GROUPS:
            said = f"no Marlin kernel for groups of {self.group_size}; what its older kernels do was not followed"
            yield Refusal("TGI", said, TGI_MARLIN, certain=False)

    @property
    def only_float16_elsewhere(self) -> bool:
        """Of a folder that was read, `sym` means that its config says `zero_point: false`; vLLM's Marlin wants true."""
        return self.group_size not in MARLIN_GROUPS or self.sym


class AwqDialect(Dialect):
    quant_method: ClassVar[str] = "awq"
    formats: ClassVar[tuple[type[Format], ...]] = (Awq,)
    readers: ClassVar[Mapping[EngineName, str]] = {
        "transformers": TRANSFORMERS_AWQ,
        "vLLM": VLLM_MARLIN,
        "SGLang": SGLANG_AWQ,
        "TGI": TGI_MARLIN,
    }
    refusals: ClassVar[tuple[Refusal, ...]] = (Refusal("TensorRT-LLM", TRT_READS_ITS_OWN, TRT_CONFIG),)
    packages: ClassVar[Mapping[EngineName, tuple[str, ...]]] = {"transformers": ("gptqmodel",)}
    refusals_of_experts: ClassVar[tuple[Refusal, ...]] = (leaves_experts_out(TRANSFORMERS_AWQ),)

    def write(self, modules: Mapping[str, Format], kept: list[str]) -> dict[str, Any]:
        if len(set(modules.values())) != 1:
            raise CannotHold("an awq checkpoint has one group size for all its layers; use compressed-tensors to mix")
        (fmt,) = set(modules.values())
        assert isinstance(fmt, Awq)
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": fmt.group_size,
            "zero_point": True,  # they are in the file, whatever they are
            "version": "gemm",
            "modules_to_not_convert": [name for name in kept if name != "lm_head"] or None,
        }

    def read(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Format]:
        layout = config.get("version") or config.get("format") or "gemm"
        bits = config.get("bits", config.get("w_bit", 4))
        if str(layout).lower() != "gemm" or bits != 4:
            raise InputError(f"this awq checkpoint is {layout!r} at {bits} bits; only the 4-bit 'gemm' layout is read")
        group_size = config.get("group_size", config.get("q_group_size", 128))
        sym = not config.get("zero_point", True)
        return {
            module: Awq(group_size=group_size, sym=sym, dtype=stored_dtype(f"{module}.scales", tensors))
            for module in modules_with("qweight", tensors)
        }
