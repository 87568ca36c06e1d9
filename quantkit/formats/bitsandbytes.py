"""bitsandbytes checkpoints (`quant_method: bitsandbytes`): NF4, FP4 and LLM.int8 layers and their config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quantkit.errors import CannotHold, InputError
from quantkit.formats.base import Dialect, Format, TensorInfo, modules_with
from quantkit.formats.bnb_4bit import BLOCK_SIZES, STATE, Bnb4Bit, Fp4, Nf4
from quantkit.formats.engine_rules import (
    SGLANG_BNB,
    TGI_METHODS,
    TRANSFORMERS_BNB,
    TRT_CONFIG,
    TRT_READS_ITS_OWN,
    VLLM_BNB,
    EngineName,
    Refusal,
)
from quantkit.formats.llm_int8 import LlmInt8

_ROUNDS_AT_START = "rounds 16-bit weights when it starts, and reads no stored codes; give it the original model"


class BitsAndBytesDialect(Dialect):
    quant_method: ClassVar[str] = "bitsandbytes"
    formats: ClassVar[tuple[type[Format], ...]] = (Nf4, Fp4, LlmInt8)
    readers: ClassVar[Mapping[EngineName, str]] = {
        "transformers": TRANSFORMERS_BNB,
        "vLLM": VLLM_BNB,
        "SGLang": SGLANG_BNB,
    }
    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal("TensorRT-LLM", TRT_READS_ITS_OWN, TRT_CONFIG),
        Refusal("TGI", _ROUNDS_AT_START, TGI_METHODS),
    )
    packages: ClassVar[Mapping[EngineName, tuple[str, ...]]] = {
        "transformers": ("bitsandbytes",),
        "vLLM": ("vllm-bnb-plugin",),
    }
    serve_flags: ClassVar[Mapping[EngineName, str]] = {  # vLLM's plugin answers to both; older SGLang needs the second
        "vLLM": "--quantization bitsandbytes --load-format bitsandbytes",
        "SGLang": "--load-format bitsandbytes",
    }
    cut_elsewhere: ClassVar[bool] = False
    refusals_of_experts: ClassVar[tuple[Refusal, ...]] = (
        Refusal(
            "transformers",
            "takes the codes of experts for weights; use a recipe of compressed-tensors",
            TRANSFORMERS_BNB,
        ),
    )

    def write(self, modules: Mapping[str, Format], kept: list[str]) -> dict[str, Any]:
        if len(set(modules.values())) != 1:
            raise CannotHold(
                "a bitsandbytes checkpoint has one scheme for all its layers; use compressed-tensors to mix"
            )
        (fmt,) = set(modules.values())
        four = fmt if isinstance(fmt, Bnb4Bit) else None
        eight = fmt if isinstance(fmt, LlmInt8) else None
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": four is not None,
            "load_in_8bit": eight is not None,
            "bnb_4bit_quant_type": four.kind if four else "fp4",
            "bnb_4bit_use_double_quant": four.double_quant if four else False,
            "bnb_4bit_compute_dtype": four.dtype if four else "float32",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": eight.threshold if eight else 6.0,
            "llm_int8_skip_modules": sorted(kept) or None,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
        }

    def read(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Format]:
        if config.get("load_in_8bit") or config.get("_load_in_8bit"):
            fmt = LlmInt8(threshold=config.get("llm_int8_threshold", 6.0))
            modules: dict[str, Format] = dict.fromkeys(modules_with("SCB", tensors), fmt)
        else:
            modules = {
                module: _four_bit(kind, module, config, tensors)
                for kind in (Nf4, Fp4)
                for module in modules_with(STATE + kind.kind, tensors)
            }
        if not modules:
            raise InputError(
                "the config says bitsandbytes, but no tensor is quantized; bitsandbytes would quantize at load"
            )
        return modules


def _four_bit(
    kind: type[Bnb4Bit], module: str, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> Bnb4Bit:
    """The block size stands only in the quant_state text; it follows as well from the sizes of two tensors."""
    absmax, packed = tensors.get(f"{module}.weight.absmax"), tensors.get(f"{module}.weight")
    if absmax is None or packed is None:
        raise InputError(f"the checkpoint is incomplete: {module}.weight or its absmax is missing")
    item = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}.get(packed.dtype, 1)
    per_block = 2 * item * packed.shape[0] / absmax.shape[0]
    block = next((size for size in BLOCK_SIZES if size >= per_block - 1e-9), 4096)
    nested = f"{module}.weight.nested_absmax" in tensors
    if not nested and absmax.dtype == "U8":
        raise InputError(f"the checkpoint is incomplete: {module}.weight.nested_absmax is missing")
    return kind(block=block, double_quant=nested, dtype=config.get("bnb_4bit_compute_dtype", "bfloat16"))
