"""Matmul of 8-bit weights with 8-bit activations, rescaled in the same kernel; LLM.int8's outliers included.

Layout   x [tokens, inputs] bfloat16 or float16, rows contiguous; weight as in `weight.py`; y [tokens, outputs]
Meaning  `reference.linear.linear`: y = served_inputs(x) @ dequantize(weight).T + bias
Limits   as many inputs as `quantize_rows.py` takes

Integers are summed exactly in int32, float8 in float32. The columns with outliers, which `quantize_rows` has listed,
become 16-bit operands, and the products are exact in float32. For many tokens the first of them lie side by side: one
more step of the product (`outliers.py`). The others are gathered, 16 or 32 at a time; where they are too many for that,
all inputs are multiplied in 16 bits (`many_outliers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.linear.arguments import check_arguments
from quantkit.kernels.linear.dot import dot
from quantkit.kernels.linear.eight_bit.many_outliers import launch_in_half, most_outliers, product_in_half
from quantkit.kernels.linear.eight_bit.quantize_rows import QuantizedRows, quantize_rows
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.splits import add_in_order, cut, store_tile
from quantkit.kernels.linear.weight import CHUNK, Kernel
from quantkit.kernels.linear.weight_only.assembly import TRITON

NAME = "8-bit matmul"

CHANGING = ("tokens", "per_split", "splits")  # from call to call: not worth a compilation each


@dataclass(frozen=True)
class EightBitConfig:
    """How the work is cut; `depth` is how many inputs one step takes."""

    outputs: int = 64
    tokens: int = 16
    depth: int = 128
    warps: int = 4
    stages: int = 4
    splits: int = 1


@triton.jit(do_not_specialize=CHANGING)
def _eight_bit(
    x,
    codes,
    code_scales,
    outliers,
    dense_inputs,
    dense_weights,
    weights,
    weight_scales,
    bias,
    y,
    partial,
    tickets,
    tokens,
    outputs,
    inputs,
    columns,
    most,
    per_split,
    splits,
    x_stride,
    y_stride,
    FLOAT8: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXACT: tl.constexpr,
    OUTLIERS: tl.constexpr,
    DENSE: tl.constexpr,
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
    last_step = tl.minimum(first + per_split, columns // DEPTH)
    weight_rows = weights + row.to(tl.int64)[:, None] * columns
    wait_for_last(CHAINED)
    if FLOAT8:
        acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    else:
        acc = tl.zeros((OUTPUTS, TOKENS), tl.int32)
    if OUTLIERS:
        count = tl.load(outliers)  # so early that nothing waits for it
        if DENSE > 0:  # noqa: SIM102  (known when the kernel is compiled)
            if count > most:  # all of it is the next launch's
                return
    for position in range(first, last_step):
        column = position * DEPTH + step
        weight = tl.load(weight_rows + column[None, :], eviction_policy="evict_first")
        if EXACT:
            mask = here[None, :] & (column < inputs)[:, None]
            value = tl.load(x + token[None, :].to(tl.int64) * x_stride + column[:, None], mask=mask, other=0.0)
            product = dot(weight.to(DTYPE), value, INTERPRET)
            if BLOCKS:
                product *= tl.load(weight_scales + row // 128 * (columns // 128) + position * DEPTH // 128)[:, None]
            acc += product
        else:
            value = tl.load(
                codes + token[None, :].to(tl.int64) * columns + column[:, None], mask=here[None, :], other=0.0
            )
            if BLOCKS:
                block = position * DEPTH // 128
                scale = tl.load(weight_scales + row // 128 * (columns // 128) + block)
                token_scale = tl.load(code_scales + block * tokens + token, mask=here, other=0.0)
                acc += dot(weight, value, INTERPRET) * (scale[:, None] * token_scale[None, :])
            elif FLOAT8:
                acc += dot(weight, value, INTERPRET)
            else:
                acc = tl.dot(weight, value, acc, out_dtype=tl.int32)
    result = acc.to(tl.float32)
    if not BLOCKS:
        if not EXACT:
            result *= tl.load(code_scales + token, mask=here, other=0.0)[None, :]
        if OUTLIERS:
            if DENSE > 0:
                wanted = (split == 0) & (count > 0)
                result = _add_dense(result, wanted, dense_inputs, dense_weights, row, token, here, DENSE, INTERPRET)
            if count <= most:
                result = add_gathered(result, x, outliers, count, weight_rows, token, here, x_stride, split, splits,
                                      DENSE, DTYPE, INTERPRET)  # fmt: skip
            elif DENSE == 0:
                result = product_in_half(x, weight_rows, token, here, first, last_step, inputs, x_stride, OUTPUTS,
                                         TOKENS, DEPTH, 2, DTYPE, INTERPRET)  # fmt: skip
        result *= tl.load(weight_scales + row)[:, None]
    result, last = add_in_order(result, partial, tickets, split, splits, OUTPUTS, TOKENS)
    if last:
        store_tile(result, bias, y, row, token, tokens, outputs, y_stride, HAS_BIAS, DTYPE, INTERPRET)


@triton.jit
def _add_dense(total, wanted, inputs, weights, row, token, here, DENSE: tl.constexpr, INTERPRET: tl.constexpr):
    """total and, where `wanted`, the product of the outlier columns that lie side by side, float32."""
    if wanted:
        index = tl.arange(0, DENSE)
        weight = tl.load(weights + row.to(tl.int64)[:, None] * DENSE + index[None, :])
        place = inputs + token.to(tl.int64)[None, :] * DENSE + index[:, None]
        total += dot(weight, tl.load(place, mask=here[None, :], other=0.0), INTERPRET)
    return total


@triton.jit
def add_gathered(
    total,
    x,
    outliers,
    count,
    weight_rows,
    token,
    here,
    x_stride,
    split,
    splits,
    DENSE: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """total and this split's share in the product of the outlier columns from index DENSE on, float32."""
    at_once: tl.constexpr = 16 if DENSE else 32  # tiles of many tokens have few registers left
    for first in range(DENSE + split * at_once, count, splits * at_once):
        index = first + tl.arange(0, at_once)
        inside = index < count
        column = tl.load(outliers + 1 + index, mask=inside, other=0)
        weight = tl.load(weight_rows + column[None, :], mask=inside[None, :], other=0)
        mask = here[None, :] & inside[:, None]
        value = tl.load(x + token[None, :].to(tl.int64) * x_stride + column[:, None], mask=mask, other=0.0)
        total += dot(weight.to(tl.float32).to(DTYPE), value, INTERPRET)
    return total


def matmul(
    x: Tensor, weight: EightBitWeight, config: EightBitConfig, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """y [tokens, outputs] in x's dtype."""
    check_arguments(NAME, x, weight, bias, out)
    y = x.new_empty(x.shape[0], weight.outputs) if out is None else out
    if x.shape[0] == 0:
        return y
    rows = None if weight.activations == "exact" else quantize_rows(x, weight)
    launch(x, rows, weight, config, bias, y)
    if rows is not None and rows.outliers is not None and rows.dense is not None and weight.threshold < float("inf"):
        launch_in_half(x, rows.outliers, weight, bias, y)
    return y


def launch(
    x: Tensor,
    rows: QuantizedRows | None,
    weight: EightBitWeight,
    config: EightBitConfig,
    bias: Tensor | None,
    y: Tensor,
) -> None:
    """The matmul alone, for activations that are quantized already."""
    tokens = x.shape[0]
    if weight.columns % config.depth or (weight.scales.ndim == 2 and config.depth != CHUNK):
        raise InputError(
            f"{NAME}: a depth of {config.depth} does not fit {weight.columns} columns or blocks of {CHUNK}"
        )
    steps = weight.columns // config.depth
    dense = rows.dense if rows else None
    shared = cut(NAME, tokens, weight.outputs, weight.rows, steps, config, x.device)
    _eight_bit[shared.grid](
        x,
        rows.codes if rows else None,
        rows.scales if rows else None,
        rows.outliers if rows else None,
        dense.inputs if dense else None,
        dense.weights if dense else None,
        weight.values,
        weight.scales,
        bias,
        y,
        shared.partial,
        weight.tickets,
        tokens,
        weight.outputs,
        weight.inputs,
        weight.columns,
        most_outliers(weight.inputs),
        shared.per_split,
        shared.grid[2],
        x.stride(0),
        y.stride(0),
        FLOAT8=weight.code_type == "fp8",
        BLOCKS=weight.scales.ndim == 2,
        EXACT=weight.activations == "exact",
        OUTLIERS=weight.activations == "outliers",
        DENSE=dense.inputs.shape[1] if dense else 0,
        HAS_BIAS=bias is not None,
        DTYPE=TRITON[x.dtype],
        INTERPRET=triton.knobs.runtime.interpret,
        OUTPUTS=config.outputs,
        TOKENS=config.tokens,
        DEPTH=config.depth,
        **chained(x.device),
        num_warps=config.warps,
        num_stages=config.stages,
    )


KERNEL = Kernel("eight_bit", matmul, EightBitConfig)
