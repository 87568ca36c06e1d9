"""What the tensors of a checkpoint take on a device, from the headers of its files."""

from __future__ import annotations

import math

import torch

from quantkit.arch import FAMILIES
from quantkit.checkpoint import Checkpoint
from quantkit.formats import TensorInfo
from quantkit.formats.base import name_in_block
from quantkit.kernels.cpu import installed
from quantkit.kernels.linear.arithmetic import takes_float8
from quantkit.runtime.model.embedding import EMBEDDING

_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


def held_dtype(stored: TensorInfo, dtype: torch.dtype) -> torch.dtype:
    """Of a plain tensor beside activations of this dtype. Matrices of 16 bits stay so beside float32, which only a CPU
    computes in, where its kernels multiply both."""
    half = _HALVES.get(stored.dtype)
    keeps = dtype == torch.float32 and len(stored.shape) == 2 and installed.can_compile()
    return half if keeps and half is not None else dtype


def tensor_bytes(checkpoint: Checkpoint, dtype: torch.dtype, arithmetic: str | None = None) -> dict[str, int]:
    """Of every tensor: quantized parts as stored, others as they are held.

    What a family keeps in float32, or decodes when it is loaded, counts as that. Layers that never run are left out.
    A copy in float8 counts with the first part of its layer.
    """
    config, plain = checkpoint.config, set(checkpoint.plain_names())
    family = FAMILIES.get(config.get("model_type", ""))
    precise = set(family.in_float32(config)) if family else set()
    decoded = {f"{module}.weight" for module in family.decoded_at_load(config)} if family else set()
    found = {}
    for name, stored in checkpoint.tensors.items():
        held = dtype if name in decoded else held_dtype(stored.info, dtype)
        item = torch.float32.itemsize if name in precise else held.itemsize
        found[name] = math.prod(stored.info.shape) * item if name in plain else stored.nbytes
    if EMBEDDING in checkpoint.formats and family and family.tied(config):
        found |= {name: 2 * found[name] for name in checkpoint.part_names(EMBEDDING)}  # laid out for the head as well
    for module in family.decoded_at_load(config) if family else ():
        if module in checkpoint.formats:
            first, *others = checkpoint.part_names(module)
            found |= dict.fromkeys(others, 0) | {first: math.prod(checkpoint.layer_shape(module)) * dtype.itemsize}
    for module, fmt in checkpoint.formats.items() if arithmetic == "fp8-copy" else ():
        if takes_float8(fmt) and name_in_block(module) and ".experts." not in module:
            found[checkpoint.part_names(module)[0]] += math.prod(checkpoint.layer_shape(module))
    return {name: size for name, size in found.items() if not (family and family.is_beyond(name, config))}
