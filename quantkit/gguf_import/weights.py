"""Tensors of a GGUF file as numbers: decoded, rows put back in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from quantkit.checkpoint import require_finite
from quantkit.errors import InputError
from quantkit.gguf_import.placement import Placement
from quantkit.gguf_import.reader import GgufFile
from quantkit.gguf_view import own_row_order


def read_weight(file: GgufFile, place: Placement, dtype: torch.dtype) -> Tensor:
    """One decoded weight, ready to be written."""
    tensor = file.tensors[place.source]
    data = tensor.data if place.expert is None else tensor.data[place.expert]
    with np.errstate(all="ignore"):  # damaged scales are reported below, by name
        values = dequantize(data, tensor.tensor_type).reshape(place.shape)
    weight = torch.from_numpy(values if values.flags.writeable else values.copy())
    require_finite(place.source, weight)
    weight = (weight - place.minus if place.minus else weight).to(dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(weight).all()):
        raise InputError(f"tensor {place.source} is too large for float16; choose --dtype bfloat16 or float32")
    return own_row_order(weight, place.permuted_heads) if place.permuted_heads else weight


def tensor_types(file: GgufFile) -> dict[str, int]:
    """How many tensors of each ggml type a file holds, most frequent first."""
    names = [tensor.tensor_type.name for tensor in file.tensors.values()]
    return {name: names.count(name) for name in sorted(set(names), key=lambda name: (-names.count(name), name))}


def check_types(file: GgufFile, places: Sequence[Placement]) -> None:
    """Refuses a file with a type that cannot be decoded."""
    known = {kind for kind in {tensor.tensor_type for tensor in file.tensors.values()} if decodable(kind)}
    for place in places:
        kind = file.tensors[place.source].tensor_type
        if kind not in known:
            raise InputError(
                f"tensor {place.source} has type {kind.name}, which cannot be decoded; "
                "take a file in a common type such as Q8_0, Q4_K_M or F16"
            )


def decodable(kind: Any) -> bool:
    """Whether the gguf package can decode a type: asked of the package, with one block of zeros."""
    block_bytes = GGML_QUANT_SIZES[kind][1]
    try:
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True
