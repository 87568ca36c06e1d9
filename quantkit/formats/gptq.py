"""GPTQ checkpoints (`quant_method: gptq`), as written by AutoGPTQ, GPTQModel and auto-round.

qweight int32 [in * bits / 32, out]       codes, packed along the inputs
qzeros  int32 [groups, ceil(out*bits/32)] zero points, packed along the outputs; version 1 stores them minus 1
scales  float [groups, out]
g_idx   int32 [in]                        the group of every input, in original order
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    check_choice,
    check_divides,
    modules_with,
    name_in_block,
    scaled,
    stored_dtype,
    widen,
)
from quantkit.formats.bits import BLOCK, pack, packed_width, unpack
from quantkit.formats.engine_rules import (
    SGLANG_GPTQ,
    TGI_MARLIN,
    TGI_TRITON,
    TRANSFORMERS_GPTQ,
    TRT_CONFIG,
    TRT_READS_ITS_OWN,
    VLLM_GPTQ,
    EngineName,
    Refusal,
    leaves_experts_out,
)
from quantkit.formats.integer import (
    MARLIN_GROUPS,
    IntegerFormat,
    IntegerWeight,
    contiguous_groups,
    middle_code,
    refused_groups,
)


@dataclass(frozen=True)
class Gptq(IntegerFormat):
    """`version` 1 is what every reader knows; it cannot hold a zero point of 0, version 2 can."""

    name: ClassVar[str] = "gptq"
    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    dtype_follows_model: ClassVar[bool] = False
    allowed_bits: ClassVar[tuple[int, ...]] = (2, 3, 4, 8)

    act_order: bool = False
    version: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("gptq: version", self.version, (1, 2))

    def describe(self) -> str:
        return super().describe() + (" act-order" if self.act_order else "")

    @property
    def zero_floor(self) -> int:
        return 1 if self.version == 1 else 0

    def check(self, shape: Shape) -> None:
        super().check(shape)
        per_word = 32 if self.bits == 3 else 32 // self.bits
        check_divides(f"gptq at {self.bits} bits: the layer's input size", shape[1], per_word, "keep this layer")

    def parts(self, shape: Shape) -> dict[str, PartSpec]:
        out, inputs = shape
        groups = self.group_count(inputs)
        return {
            "qweight": PartSpec(torch.int32, (packed_width(inputs, self.bits), out)),
            "qzeros": PartSpec(torch.int32, (groups, packed_width(out, self.bits))),
            "scales": PartSpec(DTYPES[self.dtype], (groups, out)),
            "g_idx": PartSpec(torch.int32, (inputs,)),
        }

    def stored_shape(self, sizes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> Shape:
        return sizes["qweight"][1], sizes["qweight"][0] * 32 // self.bits

    def pack(self, quantized: QuantizedWeight) -> Parts:
        weight = self.require_integer(quantized)
        self.check(weight.shape)
        if weight.group_of is not None and not self.act_order:
            raise CannotHold("the weights have scattered groups (act-order), set act_order to store them")
        if self.version == 1 and bool((weight.zeros == 0).any()):
            raise CannotHold("gptq version 1 cannot store a zero point of 0; use version 2 or compressed-tensors")
        zeros = weight.zeros - 1 if self.version == 1 else weight.zeros
        return {
            "qweight": pack(weight.codes, self.bits).mT.contiguous(),
            "qzeros": pack(zeros.mT, self.bits),
            "scales": weight.scales.mT.contiguous(),
            "g_idx": weight.input_groups().to(torch.int32),
        }

    def unpack(self, parts: Mapping[str, Tensor]) -> IntegerWeight:
        out = parts["scales"].shape[1]
        inputs = parts["qweight"].shape[0] * 32 // self.bits
        codes = unpack(parts["qweight"].mT, self.bits, inputs)
        zeros = self._unpack_zeros(parts["qzeros"], out).mT.contiguous()
        width = self.group_width(inputs)
        scales = parts["scales"].mT.contiguous()
        return IntegerWeight(codes, scales, zeros, self.bits, width, self.scattered_groups(parts))

    def narrow(self, parts: Mapping[str, Tensor], shape: Shape, outputs: slice, inputs: slice) -> Narrowed:
        width = self.group_width(shape[1])
        if self.scattered_groups(parts) is not None:
            inputs = slice(0, shape[1])
        inputs = widen(inputs, math.lcm(BLOCK, self.input_unit(shape[1])), shape[1])
        outputs = widen(outputs, BLOCK, shape[0])
        groups = scaled(inputs, 1, width)
        narrowed = {
            "qweight": parts["qweight"][scaled(inputs, self.bits, 32), outputs],
            "qzeros": parts["qzeros"][groups, scaled(outputs, self.bits, 32)],
            "scales": parts["scales"][groups, outputs],
        }
        if "g_idx" in parts:
            narrowed["g_idx"] = parts["g_idx"][inputs] - groups.start
        return Narrowed(narrowed, outputs, inputs)

    def scattered_groups(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        """Without act-order the order is known, and some writers leave it out."""
        groups = parts["g_idx"] if self.act_order and self.group_size != -1 else parts.get("g_idx")
        if groups is None:
            return None
        in_order = contiguous_groups(len(groups), self.group_width(len(groups)), groups.device)
        return None if torch.equal(groups, in_order) else groups

    def refusals(self) -> Iterator[Refusal]:
        if not (self.sym and self.bits in (4, 8)):
            said = f"GPTQ only symmetric at 4 or 8 bits, not {self.describe()}; use compressed-tensors or AWQ"
            yield Refusal("vLLM", said, VLLM_GPTQ)
        yield from refused_groups(self.group_size)
        if self.group_size == -1 and not self.sym:
            yield Refusal("SGLang", "asymmetric GPTQ needs groups", SGLANG_GPTQ)
        yield from self._refused_by_tgi()

    def _refused_by_tgi(self) -> Iterator[Refusal]:
        """Its Marlin kernels take no zero points, and so no version of them; what else it has is older."""
        if self.bits == 3:
            yield Refusal("TGI", "GPTQ only at 2, 4 or 8 bits, not 3", TGI_TRITON)
        elif not (self.sym and self.bits in (4, 8) and self.group_size in MARLIN_GROUPS):
            if self.version == 2:
                yield Refusal("TGI", "reads all zero points as those of GPTQ's version 1", TGI_TRITON)
            said = f"no Marlin kernel for GPTQ {self.describe()}; what its older kernels do was not followed"
            yield Refusal("TGI", said, TGI_MARLIN, certain=False)

    @property
    def only_float16_elsewhere(self) -> bool:
        return self.group_size not in MARLIN_GROUPS or not self.sym or self.bits not in (4, 8)

    def _unpack_zeros(self, words: Tensor, out: int) -> Tensor:
        """Zero points [groups, out]. GPTQModel subtracts 1 from whole words, so borrows are undone on whole words."""
        if self.version == 2:
            zeros = unpack(words, self.bits, out)
        elif self.bits == 3:  # fields straddle words; here writers only ever store z >= 1
            zeros = (unpack(words, 3, out) + 1) & 7
        else:
            one_each = sum(1 << shift for shift in range(0, 32, self.bits))  # in every field of a word
            zeros = unpack(words + one_each, self.bits, out)
        other = middle_code(self.bits) + (1 if self.version == 1 else -1)
        if self.sym and bool((zeros == other).all()):
            raise ValueError(f"symmetric, but every zero point is {other}: checkpoint_format names the other version")
        return zeros


def _common_format(modules: Mapping[str, Gptq]) -> Gptq:
    return Counter(modules.values()).most_common(1)[0][0]


def _quantized_in_blocks(modules: Iterable[str], kept: Iterable[str]) -> dict[str, Any]:
    """transformers ignores `dynamic`; this key tells it, and vLLM, which layers of a block are quantized.

    It holds for all blocks alike: where they differ, transformers cannot load the checkpoint.
    """
    quantized = list(dict.fromkeys(name_in_block(name) or name for name in modules))
    left = {inside for name in kept if (inside := name_in_block(name))}
    return {"modules_in_block_to_quantize": [quantized]} if left and left.isdisjoint(quantized) else {}


def _options(fmt: Gptq) -> dict[str, Any]:
    return {"bits": fmt.bits, "group_size": fmt.group_size, "sym": fmt.sym, "desc_act": fmt.act_order}


class GptqDialect(Dialect):
    quant_method: ClassVar[str] = "gptq"
    formats: ClassVar[tuple[type[Format], ...]] = (Gptq,)
    readers: ClassVar[Mapping[EngineName, str]] = {
        "transformers": TRANSFORMERS_GPTQ,
        "vLLM": VLLM_GPTQ,
        "SGLang": SGLANG_GPTQ,
        "TGI": TGI_MARLIN,
    }
    refusals: ClassVar[tuple[Refusal, ...]] = (Refusal("TensorRT-LLM", TRT_READS_ITS_OWN, TRT_CONFIG),)
    packages: ClassVar[Mapping[EngineName, tuple[str, ...]]] = {"transformers": ("gptqmodel", "optimum")}
    lists_gates: ClassVar[bool] = False  # nobody's GPTQ files do, and engines know it
    refusals_of_experts: ClassVar[tuple[Refusal, ...]] = (leaves_experts_out(TRANSFORMERS_GPTQ),)

    def write(self, modules: Mapping[str, Format], kept: list[str]) -> dict[str, Any]:
        gptq = {name: fmt for name, fmt in modules.items() if isinstance(fmt, Gptq)}
        common = _common_format(gptq)
        if any(fmt.version != common.version for fmt in gptq.values()):
            raise CannotHold("a gptq checkpoint has one version for all its layers")
        dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in kept if name != "lm_head"}
        dynamic |= {f"+:^{re.escape(name)}$": _options(fmt) for name, fmt in gptq.items() if fmt != common}
        config: dict[str, Any] = {
            "quant_method": "gptq",
            **_options(common),
            "lm_head": "lm_head" in gptq,
            "checkpoint_format": "gptq" if common.version == 1 else "gptq_v2",
            "pack_dtype": "int32",
        }
        return config | ({"dynamic": dynamic} if dynamic else {}) | _quantized_in_blocks(gptq, kept)

    def read(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Format]:
        options = _read_options(config)
        dynamic = config.get("dynamic") or {}
        return {
            module: Gptq(**(options | _override(module, dynamic)), dtype=stored_dtype(f"{module}.scales", tensors))
            for module in modules_with("qweight", tensors)
        }

    def side_files(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {"quantize_config.json": config}


def _read_options(config: Mapping[str, Any]) -> dict[str, Any]:
    def first(*names: str, default: Any = None) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), default)

    bits = first("bits", "w_bit", "wbits")
    if bits is None:
        raise InputError("the gptq quantization_config has no 'bits'")
    if first("sym") is None:
        warnings.warn("the gptq quantization_config does not say 'sym'; taking it as symmetric", stacklevel=2)
    return {
        "bits": bits,
        "group_size": first("group_size", "q_group_size", default=-1),
        "sym": first("sym", default=True),
        "act_order": first("desc_act", default=False),
        "version": _version(first("checkpoint_format", "format", "version", default="gptq")),
    }


def _version(checkpoint_format: Any) -> int:
    """Others lay the codes out in other ways (`marlin`, `gptq_p`), or are damage."""
    check_choice("checkpoint_format of the gptq quantization_config", checkpoint_format, ("gptq", "gptq_v2"))
    return 2 if checkpoint_format == "gptq_v2" else 1


def _override(module: str, dynamic: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """GPTQModel's per-module rules: the first pattern that matches wins; '-:' marks modules left unquantized."""
    for pattern, values in dynamic.items():
        if re.match(pattern.removeprefix("+:").removeprefix("-:"), module):
            renamed = {"act_order" if key == "desc_act" else key: value for key, value in values.items()}
            return {key: renamed[key] for key in ("bits", "group_size", "sym", "act_order") if key in renamed}
    return {}
