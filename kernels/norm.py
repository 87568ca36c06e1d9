"""RMSNorm of rows, with the residual sum before it in the same launch.

Layout   x, residual, out  [tokens, width], rows of any stride; weight [width]; all of one dtype
Meaning  `reference.elementwise.rms_norm` and `add_rms_norm`. The mean square is taken in float32. Rounding is where
         transformers rounds: Llama's norm rounds the normalised row and multiplies by the weight in the model's dtype;
         Gemma's (`plus_one`) multiplies by 1 + weight in float32 and rounds once; the residual sum is rounded first
Limits   bfloat16, float16 or float32; width up to 32,768

One program holds one row in registers, so that every element is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.checks import HALVES, check_contiguous, check_dtype, check_rows, check_same_device, check_shape

LARGEST_WIDTH = 32768
FLOATS = (*HALVES, torch.float32)


@triton.jit
def _norm_rows(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    out_stride,
    width,
    eps,
    ADD: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < width
    dtype = out.dtype.element_ty
    # Loaded before the sum over the row, so that both wait for memory at once.
    scale = tl.load(weight + columns, mask=here, other=0.0).to(tl.float32)
    wait_for_last(CHAINED)
    row = tl.load(x + token * x_stride + columns, mask=here, other=0.0).to(tl.float32)
    if ADD:
        place = residual + token * residual_stride + columns
        total = (row + tl.load(place, mask=here, other=0.0).to(tl.float32)).to(dtype)
        tl.store(place, total, mask=here)
        row = total.to(tl.float32)
    normal = row * tl.rsqrt(tl.sum(row * row, axis=0) / width + eps)
    if PLUS_ONE:
        result = normal * (1.0 + scale)
    else:
        normal = normal.to(dtype)  # a rounding of its own
        result = normal.to(tl.float32) * scale
    tl.store(out + token * out_stride + columns, result.to(dtype), mask=here)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, out: Tensor | None = None) -> Tensor:
    """The norm of each row of x. `out` may be x itself."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _check("rms_norm", weight, x=x, out=out)
    _launch(x, x, weight, out, eps, add=False, plus_one=plus_one)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, out: Tensor | None = None
) -> Tensor:
    """The norm of each row of x + residual. Writes the sum over `residual`; `out` may be x itself."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _check("add_rms_norm", weight, x=x, residual=residual, out=out)
    _launch(x, residual, weight, out, eps, add=True, plus_one=plus_one)
    return out


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, add: bool, plus_one: bool) -> None:
    tokens, width = x.shape
    if tokens == 0 or width == 0:
        return
    block = triton.next_power_of_2(width)
    _norm_rows[(tokens,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        width,
        eps,
        ADD=add,
        PLUS_ONE=plus_one,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),  # 16 elements a thread: two 16-byte loads of a half
        **chained(x.device),
    )


def _check(kernel: str, weight: Tensor, **rows: Tensor) -> None:
    x = rows["x"]
    check_dtype(kernel, "x", x, FLOATS)
    check_shape(kernel, "x", x, (None, None))
    if x.shape[1] > LARGEST_WIDTH:
        raise InputError(f"{kernel}: rows of {x.shape[1]} elements, but at most {LARGEST_WIDTH} fit")
    for name, tensor in rows.items():
        check_dtype(kernel, name, tensor, (x.dtype,))
        check_shape(kernel, name, tensor, x.shape)
        check_rows(kernel, name, tensor)
    check_dtype(kernel, "weight", weight, (x.dtype,))
    check_shape(kernel, "weight", weight, (x.shape[1],))
    check_contiguous(kernel, "weight", weight)
    check_same_device(kernel, weight=weight, **rows)
