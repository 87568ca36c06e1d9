"""What a token's experts computed as one sum, in the order of their numbers, and the shared expert beside them.

Layout   y [pairs, hidden], a pair under its number; weights [tokens, per_token]; shared [tokens, hidden] or None, gate
         [tokens, 1] or None; all of one dtype but weights, which may be float32; rows contiguous
Meaning  the sum of `reference.experts.sum_of_experts`, in float32, then `add_shared_expert`
         A pair that counts 0 is not read: experts of other ranks wrote nothing there
Limits   bfloat16 or float16
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.activation import sigmoid
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.checks import HALVES, check_contiguous, check_dtype, check_rows, check_same_device, check_shape
from quantkit.kernels.linear.weight_only.assembly import TRITON
from quantkit.kernels.linear.weight_only.unpack import to_half

NAME = "sum of experts"
_BLOCK = 512


@triton.jit
def _combine(
    y,
    weights,
    shared,
    gate,
    out,
    hidden,
    shared_stride,
    gate_stride,
    PER_TOKEN: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_last(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + slot
        weight = tl.load(weights + pair).to(tl.float32)
        counts = column < tl.where(weight != 0.0, hidden, 0)
        value = tl.load(y + pair * hidden + column, mask=counts, other=0.0).to(tl.float32)
        total += value * weight
    if HAS_SHARED:
        other = tl.load(shared + token * shared_stride + column, mask=here, other=0.0).to(tl.float32)
        if HAS_GATE:
            open_ = sigmoid(tl.load(gate + token * gate_stride).to(tl.float32))
            other = to_half(to_half(open_, DTYPE, INTERPRET).to(tl.float32) * other, DTYPE, INTERPRET).to(tl.float32)
        total = to_half(total, DTYPE, INTERPRET).to(tl.float32) + other
    tl.store(out + token * hidden + column, to_half(total, DTYPE, INTERPRET), mask=here)


def combine(y: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """[tokens, hidden]."""
    tokens, per_token = weights.shape
    hidden = y.shape[-1]
    check_shape(NAME, "y", y, (tokens * per_token, None))
    check_dtype(NAME, "y", y, HALVES)
    check_dtype(NAME, "weights", weights, (y.dtype, torch.float32))
    for name, tensor in {"y": y, "weights": weights}.items():
        check_contiguous(NAME, name, tensor)
    for name, other, width in (("shared", shared, hidden), ("gate", gate, 1)):
        if other is not None:
            check_shape(NAME, name, other, (tokens, width))
            check_dtype(NAME, name, other, (y.dtype,))
            check_rows(NAME, name, other)
    check_same_device(NAME, y=y, weights=weights, shared=shared, gate=gate)
    out = torch.empty(tokens, hidden, dtype=y.dtype, device=y.device)
    if tokens == 0:
        return out
    _combine[(tokens, triton.cdiv(hidden, _BLOCK))](
        y,
        weights,
        shared,
        gate,
        out,
        hidden,
        0 if shared is None else shared.stride(0),
        0 if gate is None else gate.stride(0),
        PER_TOKEN=per_token,
        HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None,
        DTYPE=TRITON[y.dtype],
        INTERPRET=triton.knobs.runtime.interpret,
        BLOCK=_BLOCK,
        num_warps=2,
        enable_fp_fusion=False,  # a product and a sum in one would leave out the rounding between them
        **chained(y.device),
    )
    return out
