"""RMS norm on a CPU, with the sum before it where there is one; meaning as `reference.elementwise` has it."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.floats import load_floats, rounded, store_floats
from quantkit.kernels.cpu.language import F32, Code, Value
from quantkit.kernels.cpu.pool import shared_pool
from quantkit.kernels.cpu.rows import along, as_argument, load_argument, load_integers, sum_along


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    return _norm(x, None, weight, eps, plus_one)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """Writes the sum over `residual`."""
    return _norm(x, residual, weight, eps, plus_one)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    arguments = [x.data_ptr(), x.stride(0), 0 if residual is None else residual.data_ptr(), weight.data_ptr()]
    arguments += [out.data_ptr(), x.shape[1], as_argument(eps)]
    shared_pool().run(_kernel(x.dtype, plus_one, residual is not None), arguments, x.shape[0])
    return out


@cache
def _kernel(dtype: torch.dtype, plus_one: bool, adds: bool) -> int:
    return compiled("norm", 3, partial(_norm_rows, dtype=dtype, plus_one=plus_one, adds=adds))


def _norm_rows(
    code: Code, arguments: Value, first: Value, last: Value, *, dtype: torch.dtype, plus_one: bool, adds: bool
) -> None:
    x, stride, residual, weight, out, width = load_integers(code, arguments, 6)
    eps = load_argument(code, arguments, 6)
    with code.loop(first, last) as row:
        source = x + row * stride * dtype.itemsize
        if adds:
            target = residual + row * width * dtype.itemsize
            _add(code, dtype, source, target, width)
            source = target
        factor = inverse_of_rms(code, dtype, source, width, eps)
        result = out + row * width * dtype.itemsize

        def write(place: Value, lanes: int, source: Value = source, factor: Value = factor, to: Value = result) -> None:
            normal = load_floats(code, dtype, lanes, source, place) * factor.splat(lanes)
            store_floats(code, dtype, weighted(code, dtype, normal, weight, place, plus_one), to, place)

        along(code, width, write)


def _add(code: Code, dtype: torch.dtype, source: Value, target: Value, width: Value) -> None:
    def add(place: Value, lanes: int) -> None:
        both = (load_floats(code, dtype, lanes, address, place) for address in (source, target))
        store_floats(code, dtype, next(both) + next(both), target, place)

    along(code, width, add)


def inverse_of_rms(code: Code, dtype: torch.dtype, source: Value, width: Value, eps: Value) -> Value:
    """1 / sqrt(mean of squares + eps) of a row."""

    def square(place: Value, lanes: int) -> Value:
        values = load_floats(code, dtype, lanes, source, place)
        return values * values

    mean = sum_along(code, width, square) // width.to(F32)
    return code.constant(F32, 1.0) // code.of_each("sqrt", mean + eps)


def weighted(code: Code, dtype: torch.dtype, normal: Value, weight: Value, place: Value, plus_one: bool) -> Value:
    """What is normal, times its weights; rounded in between, as the families do."""
    weights = load_floats(code, dtype, normal.type.lanes, weight, place)
    return normal * (weights + 1.0) if plus_one else rounded(code, dtype, normal) * weights
