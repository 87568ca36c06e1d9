"""The gated activation of an MLP: activation(gate) * up, from the output of the fused gate-up layer.

Layout   gate_up [tokens, 2 * width], gate in the first half of a row; out [tokens, width]; rows of any stride
Meaning  `reference.elementwise.gated_activation`: the activation in float32, rounded to the dtype, times up, rounded,
         as transformers does. Clipped, all of it in float32, rounded once
Limits   bfloat16, float16 or float32; activation "silu" or "gelu_pytorch_tanh"
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.checks import HALVES, check_dtype, check_rows, check_same_device, check_shape

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_BLOCK = 1024  # with four warps, one 16-byte load of each half a thread
_TWICE_ROOT_TWO_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def sigmoid(z):
    decay = tl.exp(-tl.abs(z))  # at most 1: nothing overflows
    return tl.where(z >= 0, 1.0, decay) / (1.0 + decay)


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """In float32."""
    if GELU:  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        return gate * sigmoid((gate + 0.044715 * gate * gate * gate) * _TWICE_ROOT_TWO_OVER_PI)
    else:
        return gate * sigmoid(gate)


@triton.jit
def clipped(gate, up, limit, factor):
    """gpt-oss's product of both, in float32."""
    gate = tl.minimum(gate, limit)
    return gate * sigmoid(factor * gate) * (tl.minimum(tl.maximum(up, -limit), limit) + 1.0)


@triton.jit
def _activate(
    gate_up,
    out,
    in_stride,
    out_stride,
    width,
    limit,
    factor,
    GELU: tl.constexpr,
    CLIPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_last(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    row = gate_up + token * in_stride
    gate = tl.load(row + columns, mask=here, other=0.0).to(tl.float32)
    up = tl.load(row + width + columns, mask=here, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if CLIPPED:
        result = clipped(gate, up, limit, factor)
    else:
        result = activated(gate, GELU).to(dtype).to(tl.float32) * up
    tl.store(out + token * out_stride + columns, result.to(dtype), mask=here)


def gated_activation(
    gate_up: Tensor, activation: str, *, clip: tuple[float, float] | None = None, out: Tensor | None = None
) -> Tensor:
    """activation(gate) * up, [tokens, width]; `clip`: limit and factor of a clipped SiLU, as in the reference."""
    if activation not in ACTIVATIONS:
        raise InputError(f"gated_activation: activation '{activation}', but must be one of {', '.join(ACTIVATIONS)}")
    width = _check_input(gate_up)
    tokens = gate_up.shape[0]
    if out is None:
        out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    check_dtype("gated_activation", "out", out, (gate_up.dtype,))
    check_shape("gated_activation", "out", out, (tokens, width))
    check_rows("gated_activation", "out", out)
    check_same_device("gated_activation", gate_up=gate_up, out=out)
    if tokens == 0 or width == 0:
        return out
    _activate[(tokens, triton.cdiv(width, _BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        width,
        *(clip or (0.0, 0.0)),
        GELU=activation == "gelu_pytorch_tanh",
        CLIPPED=clip is not None,
        BLOCK=_BLOCK,
        num_warps=4,
        **chained(gate_up.device),
    )
    return out


def _check_input(gate_up: Tensor) -> int:
    """The width of one half."""
    check_dtype("gated_activation", "gate_up", gate_up, (*HALVES, torch.float32))
    check_shape("gated_activation", "gate_up", gate_up, (None, None))
    check_rows("gated_activation", "gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise InputError(
            f"gated_activation: rows of {gate_up.shape[1]} elements, but gate and up are equally long: must be even"
        )
    return int(gate_up.shape[1]) // 2
