"""Tokens in float32, as kernels read them that multiply floats."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.float8 import RAISED
from quantkit.kernels.cpu.floats import load_floats
from quantkit.kernels.cpu.language import F32, Code, Value
from quantkit.kernels.cpu.pool import shared_pool
from quantkit.kernels.cpu.rows import along, load_integers


def widened(x: Tensor, inputs: int = 0, *, raised: bool = False) -> Tensor:
    """x [tokens, inputs], contiguous, with zeros up to so many inputs, raised where it meets float8 (`float8.py`); x
    itself where that is the same."""
    padded = max(inputs, x.shape[1])
    if not raised and x.dtype == torch.float32 and x.is_contiguous() and padded == x.shape[1]:
        return x
    x = x if x.stride(1) == 1 else x.contiguous()
    wide = torch.empty(x.shape[0], padded)
    arguments = [x.data_ptr(), x.stride(0), x.shape[1], wide.data_ptr(), padded]
    shared_pool().run(_kernel(x.dtype, RAISED if raised else 1.0), arguments, x.shape[0])
    return wide


@cache
def _kernel(dtype: torch.dtype, factor: float) -> int:
    return compiled("widen", 3, partial(_widen, dtype=dtype, factor=factor))


def _widen(code: Code, arguments: Value, first: Value, last: Value, *, dtype: torch.dtype, factor: float) -> None:
    x, stride, inputs, wide, padded = load_integers(code, arguments, 5)
    with code.loop(first, last) as token:

        def write(place: Value, lanes: int, token: Value = token) -> None:
            value = load_floats(code, dtype, lanes, x, token * stride + place)
            code.store(value if factor == 1.0 else value * factor, wide, token * padded + place)

        along(code, inputs, write)
        with code.loop(inputs, padded) as place:
            code.store(code.constant(F32, 0.0), wide, token * padded + place)
