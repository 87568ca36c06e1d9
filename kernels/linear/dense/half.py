"""Matmul of weights that are not quantized, for few tokens: nothing but reading the weight takes time.

Layout   x [tokens, inputs] bfloat16 or float16, rows contiguous; weight as in `weight.py`; y [tokens, outputs]
Meaning  y = x @ weight.T + bias, accumulated in float32
Limits   any number of tokens, but made for 1 to about 64: every tile of tokens reads the weight once more

The weight is the left operand (y^T = W x^T), and travels through shared memory, `stages` tiles ahead. Programs share a
tile of outputs by splitting the inputs, as in `weight_only/skinny.py`. With tiles of one token there are no matrix
instructions: threads multiply and add, and many small programs keep the memory busy instead of copies ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.checks import check_dtype
from quantkit.kernels.linear.arguments import check_arguments
from quantkit.kernels.linear.dense.weight import HalfWeight
from quantkit.kernels.linear.splits import add_in_order, cut, store_tile
from quantkit.kernels.linear.weight import Kernel
from quantkit.kernels.linear.weight_only.assembly import TRITON

NAME = "16-bit matmul"

CHANGING = ("tokens", "steps", "per_split", "splits")  # from call to call: not worth a compilation each


@dataclass(frozen=True)
class HalfConfig:
    """How the work is cut; `depth` is how many inputs one step takes.

    Tiles of one token are multiplied without matrix instructions; with one stage they are loaded straight to registers.
    """

    outputs: int = 64
    tokens: int = 16
    depth: int = 128
    warps: int = 4
    stages: int = 4
    splits: int = 1


@triton.jit
def _weight_rows(weights, row, outputs, inputs, WHOLE_TILES: tl.constexpr):
    """Pointers [rows, 1]. The last tile reads the last row again instead of what lies behind it, and keeps nothing."""
    if not WHOLE_TILES:
        row = tl.minimum(row, outputs - 1)
    return weights + row.to(tl.int64)[:, None] * inputs


@triton.jit
def _load_weight(weight_rows, column, inputs, WHOLE_STEPS: tl.constexpr):
    if WHOLE_STEPS:
        return tl.load(weight_rows + column[None, :], eviction_policy="evict_first")
    else:
        inside = (column < inputs)[None, :]
        return tl.load(weight_rows + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _dot(weight, x, acc, INTERPRET: tl.constexpr):
    if INTERPRET:  # where products of bfloat16 are wrong
        return tl.dot(weight.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(weight, x, acc)


@triton.jit(do_not_specialize=CHANGING)
def _half(
    x,
    weights,
    bias,
    y,
    partial,
    tickets,
    tokens,
    outputs,
    inputs,
    steps,
    per_split,
    splits,
    x_stride,
    y_stride,
    WHOLE_STEPS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    here = token < tokens
    step = tl.arange(0, DEPTH)
    first = split * per_split
    end = tl.minimum(first + per_split, steps)
    acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    weight_rows = _weight_rows(weights, row, outputs, inputs, WHOLE_TILES)
    wait_for_last(CHAINED)
    x_rows = x + token[None, :].to(tl.int64) * x_stride
    for position in range(first, end):
        column = position * DEPTH + step
        weight = _load_weight(weight_rows, column, inputs, WHOLE_STEPS)
        mask = here[None, :]
        if not WHOLE_STEPS:
            mask = mask & (column < inputs)[:, None]
        value = tl.load(x_rows + column[:, None], mask=mask, other=0.0)  # [DEPTH, TOKENS]
        acc = _dot(weight, value, acc, INTERPRET)
    acc, last = add_in_order(acc, partial, tickets, split, splits, OUTPUTS, TOKENS)
    if last:
        store_tile(acc, bias, y, row, token, tokens, outputs, y_stride, HAS_BIAS, DTYPE, INTERPRET)


@triton.jit(do_not_specialize=CHANGING)
def _one_token(
    x,
    weights,
    bias,
    y,
    partial,
    tickets,
    tokens,
    outputs,
    inputs,
    steps,
    per_split,
    splits,
    x_stride,
    y_stride,
    WHOLE_STEPS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(0) + tl.arange(0, 1)
    split = tl.program_id(2)
    step = tl.arange(0, DEPTH)
    first = split * per_split
    end = tl.minimum(first + per_split, steps)
    weight_rows = _weight_rows(weights, row, outputs, inputs, WHOLE_TILES)
    wait_for_last(CHAINED)
    x_row = x + tl.program_id(0).to(tl.int64) * x_stride
    acc = tl.zeros((OUTPUTS, DEPTH // 8), tl.float32)
    for position in tl.range(first, end, num_stages=STAGES):
        column = position * DEPTH + step
        weight = _load_weight(weight_rows, column, inputs, WHOLE_STEPS)
        if WHOLE_STEPS:
            value = tl.load(x_row + column)
        else:
            value = tl.load(x_row + column, mask=column < inputs, other=0.0)
        product = weight.to(tl.float32) * value.to(tl.float32)[None, :]
        acc += tl.sum(tl.reshape(product, (OUTPUTS, DEPTH // 8, 8)), 2)  # the 8 values of a thread's 16 bytes
    total, last = add_in_order(tl.sum(acc, 1)[:, None], partial, tickets, split, splits, OUTPUTS, 1)
    if last:
        store_tile(total, bias, y, row, token, tokens, outputs, y_stride, HAS_BIAS, DTYPE, INTERPRET)


def matmul(
    x: Tensor, weight: HalfWeight, config: HalfConfig, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """y [tokens, outputs] in x's dtype, which must be the weight's."""
    check_arguments(NAME, x, weight, bias, out)
    check_dtype(NAME, "x", x, (weight.values.dtype,))
    tokens, outputs, inputs = x.shape[0], weight.outputs, weight.inputs
    y = x.new_empty(tokens, outputs) if out is None else out
    if tokens == 0:
        return y
    steps = triton.cdiv(inputs, config.depth)
    rows = triton.cdiv(outputs, config.outputs) * config.outputs
    shared = cut(NAME, tokens, outputs, rows, steps, config, x.device)
    one = config.tokens == 1
    (_one_token if one else _half)[shared.grid](
        x,
        weight.values,
        bias,
        y,
        shared.partial,
        weight.tickets,
        tokens,
        outputs,
        inputs,
        steps,
        shared.per_split,
        shared.grid[2],
        x.stride(0),
        y.stride(0),
        WHOLE_STEPS=inputs % config.depth == 0,
        WHOLE_TILES=rows == outputs,
        HAS_BIAS=bias is not None,
        DTYPE=TRITON[x.dtype],
        INTERPRET=triton.knobs.runtime.interpret,
        OUTPUTS=config.outputs,
        DEPTH=config.depth,
        num_warps=config.warps,
        num_stages=config.stages,
        **({"STAGES": config.stages} if one else {"TOKENS": config.tokens}),
        **chained(x.device),
    )
    return y


KERNEL = Kernel("half", matmul, HalfConfig)
