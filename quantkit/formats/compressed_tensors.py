"""compressed-tensors checkpoints (`quant_method: compressed-tensors`): config groups and the layers they target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from quantkit.errors import InputError
from quantkit.formats.base import Dialect, Format, TensorInfo, modules_with, stored_dtype
from quantkit.formats.ct_float8 import BLOCK, CtFloat8
from quantkit.formats.ct_integer import CtInt8, CtPacked
from quantkit.formats.e2m1 import MX_BLOCK, NV_BLOCK
from quantkit.formats.engine_rules import SGLANG_CT, TGI_CT, TRANSFORMERS_CT, TRT_CT, VLLM_CT, EngineName
from quantkit.formats.mxfp4 import CtMxfp4
from quantkit.formats.nvfp4 import CtNvfp4

_ON_DISK = {
    CtPacked: "pack-quantized",
    CtInt8: "int-quantized",
    CtFloat8: "float-quantized",
    CtMxfp4: "mxfp4-pack-quantized",
    CtNvfp4: "nvfp4-pack-quantized",
}


class CompressedTensorsDialect(Dialect):
    quant_method: ClassVar[str] = "compressed-tensors"
    formats: ClassVar[tuple[type[Format], ...]] = (CtPacked, CtInt8, CtFloat8, CtMxfp4, CtNvfp4)
    readers: ClassVar[Mapping[EngineName, str]] = {
        "transformers": TRANSFORMERS_CT,
        "vLLM": VLLM_CT,
        "SGLang": SGLANG_CT,
        "TensorRT-LLM": TRT_CT,
        "TGI": TGI_CT,
    }
    packages: ClassVar[Mapping[EngineName, tuple[str, ...]]] = {"transformers": ("compressed-tensors",)}
    holds_kv_scales: ClassVar[bool] = True

    def write(self, modules: Mapping[str, Format], kept: list[str]) -> dict[str, Any]:
        by_format: dict[Format, list[str]] = {}
        for module, fmt in modules.items():
            by_format.setdefault(fmt, []).append(module)
        uniform = len(by_format) == 1
        groups = {
            f"group_{index}": _group(fmt, ["Linear"] if uniform else members)
            for index, (fmt, members) in enumerate(by_format.items())
        }
        kinds = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted(kept),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.19.0",
        }

    def read(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Format]:
        groups = list((config.get("config_groups") or {}).values())
        quantized = [*modules_with("weight_packed", tensors), *_scaled_modules(tensors)]
        return {module: _read_group(_group_of(module, groups), module, tensors) for module in quantized}


def _scaled_modules(tensors: Mapping[str, TensorInfo]) -> list[str]:
    return [
        module
        for module in modules_with("weight_scale", tensors)
        if (weight := tensors.get(f"{module}.weight")) and weight.dtype in ("I8", "F8_E4M3")
    ]


def _args(bits: int, kind: str, strategy: str, **changes: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": None,
        "zp_dtype": None,
    }
    return defaults | changes


def _group(fmt: Format, targets: list[str]) -> dict[str, Any]:
    inputs = None
    if isinstance(fmt, CtPacked):
        grouped = fmt.group_size != -1
        weights = _args(fmt.bits, "int", "group" if grouped else "channel", symmetric=fmt.sym)
        weights |= {"group_size": fmt.group_size if grouped else None, "zp_dtype": None if fmt.sym else "torch.int8"}
        inputs = _float8_by_token() if fmt.activations == "fp8" else None
    elif isinstance(fmt, CtInt8):
        weights = _args(8, "int", "channel")
        inputs = _args(8, "int", "token", dynamic=True, observer=None)
    elif isinstance(fmt, CtMxfp4):
        weights = _args(4, "float", "group", group_size=MX_BLOCK, scale_dtype="torch.uint8", zp_dtype="torch.uint8")
    elif isinstance(fmt, CtNvfp4):
        small = "torch.float8_e4m3fn"
        weights = _args(4, "float", "tensor_group", group_size=NV_BLOCK, scale_dtype=small, zp_dtype=small)
    else:
        assert isinstance(fmt, CtFloat8)
        weights = _args(8, "float", fmt.strategy)
        inputs = _float8_by_token()
        if fmt.strategy == "block":
            weights["block_structure"] = [BLOCK, BLOCK]
            inputs |= {"strategy": "group", "group_size": BLOCK}
        if fmt.activations == "static":
            inputs = _args(8, "float", "tensor")
        elif fmt.activations == "exact":
            inputs = None
    return {
        "targets": targets,
        "format": _ON_DISK[type(fmt)],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }


def _float8_by_token() -> dict[str, Any]:
    return _args(8, "float", "token", dynamic=True, observer=None)


def _group_of(module: str, groups: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The config group of a module: its name or a pattern first, then the class name `Linear`."""
    for group in groups:
        for target in group["targets"]:
            if target == module or (target.startswith("re:") and re.match(target[3:], module)):
                return group
    for group in groups:
        if "Linear" in group["targets"]:
            return group
    raise InputError(f"no config group of the compressed-tensors checkpoint targets {module}, which is quantized")


def _read_group(group: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> Format:
    args = group["weights"]
    if args.get("type") == "float" and f"{module}.weight_packed" in tensors:
        return _read_float4(args, module, tensors)
    dtype = stored_dtype(f"{module}.weight_scale", tensors)
    strategy = args.get("strategy") or ("channel" if args.get("group_size") in (None, -1) else "group")
    if f"{module}.weight_packed" in tensors:
        size = args["group_size"] if strategy == "group" else -1
        if args.get("actorder") in ("group", "dynamic") and f"{module}.weight_g_idx" not in tensors:
            raise InputError(f"the checkpoint is incomplete: {module}.weight_g_idx is missing, which actorder needs")
        sym = args.get("symmetric", True) and f"{module}.weight_zero_point" not in tensors
        inputs = _packed_activations(group.get("input_activations"), args["num_bits"])
        return CtPacked(bits=args["num_bits"], group_size=size, sym=sym, dtype=dtype, activations=inputs)
    stored = "int" if tensors[f"{module}.weight"].dtype == "I8" else "float"
    if args.get("type", "int") != stored:
        raise InputError(f"{module}.weight holds codes of type {stored}, but its config group says {args['type']!r}")
    if stored == "int":
        if not args.get("symmetric", True) or strategy not in ("channel", "tensor"):
            raise InputError(f"{module}: int-quantized with strategy {strategy} or zero points is not supported")
        return CtInt8(dtype=dtype)
    return CtFloat8(strategy=strategy, activations=_activations(group.get("input_activations")), dtype=dtype)


def _read_float4(args: Mapping[str, Any], module: str, tensors: Mapping[str, TensorInfo]) -> Format:
    """Inputs that are rounded elsewhere, to 4 or 8 bits, stay in 16 bits here."""
    scheme = (args["num_bits"], args.get("group_size"))
    if scheme == (4, MX_BLOCK):
        return CtMxfp4()
    if scheme == (4, NV_BLOCK) and f"{module}.weight_global_scale" in tensors:
        return CtNvfp4()
    if scheme == (4, NV_BLOCK):
        raise InputError(f"the checkpoint is incomplete: {module}.weight_global_scale is missing")
    raise InputError(
        f"{module}: packed floats of {scheme[0]} bits in groups of {scheme[1]} are not supported; MXFP4 has 4 bits in "
        f"groups of {MX_BLOCK}, NVFP4 in groups of {NV_BLOCK}"
    )


def _packed_activations(args: Mapping[str, Any] | None, bits: int) -> str:
    """In CtPacked's words. Inputs that are rounded otherwise elsewhere stay in 16 bits here."""
    by_token = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return "fp8" if args is not None and bits <= 4 and by_token.items() <= args.items() else "exact"


def _activations(args: Mapping[str, Any] | None) -> str:
    """How a group treats activations, in CtFloat8's words."""
    if args is None:
        return "exact"
    return "dynamic" if args.get("dynamic") else "static"
