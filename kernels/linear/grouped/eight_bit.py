"""Routed matmul of 8-bit weights (LLM.int8, W8A8, FP8) with activations as `eight_bit/weight.py` says.

Layout   x as `tile.py` says, bfloat16 or float16; weight as in `weight.py`; routes as in `routes.py`
Meaning  `reference.experts.linear_of_experts`; with an activation `reference.elementwise.gated_activation` after it
Limits   as many inputs as `eight_bit/quantize_rows.py` takes

Rows of x are rounded once for all experts, in a launch before. LLM.int8's outlier columns are those of all rows of a
call; tiles gather them, or multiply all inputs in 16 bits where they are too many (`eight_bit/many_outliers.py`).
Static scales belong to an expert, so tiles round by them. A card without float8 is EMULATED: its rows are rounded to
the same numbers in 16 bits, and bytes of weights become 16 bits in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.card import NO_GPU, card_of
from quantkit.kernels.chain import wait_for_last
from quantkit.kernels.linear.eight_bit.many_outliers import most_outliers, product_in_half
from quantkit.kernels.linear.eight_bit.matmul import add_gathered
from quantkit.kernels.linear.eight_bit.quantize_rows import quantize_rows, rounded_to_float8, to_float8
from quantkit.kernels.linear.grouped.routes import Routes
from quantkit.kernels.linear.grouped.tile import (
    CHANGING,
    TileConfig,
    dot,
    finish_tile,
    pairs_of_program,
    prepare_launch,
    rows_of_tile,
)
from quantkit.kernels.linear.grouped.weight import Clip, GroupedEightBit
from quantkit.kernels.linear.weight import CHUNK

_ROUNDED_BEFORE = ("token", "block", "outliers")
_HALF_DEPTH = tl.constexpr(32)  # inputs of a step in 16 bits: operands of more do not fit beside two sums of integers


@triton.jit
def _add_step(
    acc,
    value,
    weight_rows,
    scales,
    input_scale,
    row,
    position,
    block_scale,
    blocks,
    FLOAT8: tl.constexpr,
    BLOCKS: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    EMULATED: tl.constexpr,
    STREAMED: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """acc and the product of 128 inputs: `value` [128, TOKENS] with one plane's rows."""
    place = weight_rows + position * 128 + tl.arange(0, 128)[None, :]
    weight = tl.load(place, eviction_policy="evict_first") if STREAMED else tl.load(place)
    if EMULATED:
        weight = _decoded(weight).to(DTYPE)
    elif ACTIVATIONS == "exact":
        weight = weight.to(DTYPE)
    if ACTIVATIONS == "static":
        value = tl.div_rn(value.to(tl.float32), input_scale)
        value = rounded_to_float8(value).to(DTYPE) if EMULATED else to_float8(value, INTERPRET)
    if FLOAT8:
        product = dot(weight, value, None, INTERPRET)
        if BLOCKS:
            product *= tl.load(scales + row // 128 * blocks + position)[:, None]
        if ACTIVATIONS == "block":
            product *= block_scale[None, :]
        acc += product
    else:
        acc = tl.dot(weight, value, acc, out_dtype=tl.int32)
    return acc


@triton.jit
def _decoded(byte):
    """float8_e4m3 as float32: the same fields at other places, and an exponent that is 120 too small."""
    bits = byte.to(tl.int32)
    moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return moved.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _scaled(
    acc,
    x,
    outliers,
    weight_rows,
    scales,
    input_scale,
    token_scale,
    row,
    source,
    here,
    first,
    last,
    inputs,
    gathered,
    x_stride,
    split,
    splits,
    BLOCKS: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """A finished sum times its scales, in float32, with the outlier columns where there are some; where more are listed
    than are `gathered`, steps [first, last) of the product in 16 bits instead."""
    total = acc.to(tl.float32)
    if not BLOCKS:
        if ACTIVATIONS == "static":
            total *= input_scale
        elif ACTIVATIONS != "exact":
            total *= token_scale[None, :]
        if ACTIVATIONS == "outliers":
            count = tl.load(outliers)
            if count <= gathered:
                total = add_gathered(total, x, outliers, count, weight_rows, source, here, x_stride, split, splits, 0,
                                     DTYPE, INTERPRET)  # fmt: skip
            else:
                total = product_in_half(x, weight_rows, source, here, first * (128 // _HALF_DEPTH),
                                        last * (128 // _HALF_DEPTH), inputs, x_stride, OUTPUTS, TOKENS, _HALF_DEPTH, 2,
                                        DTYPE, INTERPRET)  # fmt: skip
        total *= tl.load(scales + row)[:, None]
    return total


@triton.jit(do_not_specialize=(*CHANGING, "rows_of_x"))
def _grouped_eight_bit(
    x,
    codes,
    code_scales,
    outliers,
    weights,
    weight_scales,
    input_scales,
    columns,
    gathered,
    rows_of_x,
    weights_of_plane,
    scales_of_plane,
    bias,
    order,
    tiles,
    y,
    partial,
    tickets,
    outputs,
    inputs,
    most,
    steps,
    per_split,
    splits,
    x_stride,
    y_stride,
    limit,
    factor,
    FLOAT8: tl.constexpr,
    BLOCKS: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    EMULATED: tl.constexpr,
    STREAMED: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    CLIPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    LISTED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    CHOICES: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(2)
    step = tl.arange(0, 128)
    wait_for_last(CHAINED)
    expert, start, end, ranks = pairs_of_program(order, tiles, most, LISTED, BY_PAIR, FIRST, END, CHOICES)
    plane = expert * 2 if GATED else expert
    gate_rows = weights + plane.to(tl.int64) * weights_of_plane + row[:, None] * columns
    up_rows = gate_rows + weights_of_plane
    gate_scales = weight_scales + plane * scales_of_plane
    up_scales = gate_scales + scales_of_plane
    first = split * per_split
    last = tl.minimum(first + per_split, steps)
    for begin in range(start, end, TOKENS):
        source, target, here = rows_of_tile(order, tiles, most, begin, ranks, PER_TOKEN, GATED, LISTED, TOKENS, CHOICES)
        gate_input, up_input, token_scale = 0.0, 0.0, 0.0
        if ACTIVATIONS == "static":
            gate_input = tl.load(input_scales + plane)
            up_input = tl.load(input_scales + plane + 1) if GATED else gate_input
        if ACTIVATIONS == "token" or ACTIVATIONS == "outliers":
            token_scale = tl.load(code_scales + source, mask=here, other=0.0)
        acc = tl.zeros((OUTPUTS, TOKENS), tl.float32 if FLOAT8 else tl.int32)
        up = tl.zeros((OUTPUTS, TOKENS), tl.float32 if FLOAT8 else tl.int32)
        for position in range(first, last):
            column = position * 128 + step
            if ACTIVATIONS == "exact" or ACTIVATIONS == "static":
                mask = here[None, :] & (column < inputs)[:, None]
                value = tl.load(x + (source * x_stride)[None, :] + column[:, None], mask=mask, other=0.0)
            else:
                place = codes + source.to(tl.int64)[None, :] * columns + column[:, None]
                value = tl.load(place, mask=here[None, :], other=0.0)
            block_scale = token_scale
            if ACTIVATIONS == "block":
                block_scale = tl.load(code_scales + position * rows_of_x + source, mask=here, other=0.0)
            acc = _add_step(acc, value, gate_rows, gate_scales, gate_input, row, position, block_scale, columns // 128,
                            FLOAT8, BLOCKS, ACTIVATIONS, EMULATED, STREAMED, DTYPE, INTERPRET)  # fmt: skip
            if GATED:
                up = _add_step(up, value, up_rows, up_scales, up_input, row, position, block_scale, columns // 128,
                               FLOAT8, BLOCKS, ACTIVATIONS, EMULATED, STREAMED, DTYPE, INTERPRET)  # fmt: skip
        gate_total = _scaled(acc, x, outliers, gate_rows, gate_scales, gate_input, token_scale, row, source, here,
                             first, last, inputs, gathered, x_stride, split, splits, BLOCKS, ACTIVATIONS, DTYPE,
                             INTERPRET, OUTPUTS, TOKENS)  # fmt: skip
        up_total = gate_total
        if GATED:
            up_total = _scaled(up, x, outliers, up_rows, up_scales, up_input, token_scale, row, source, here,
                               first, last, inputs, gathered, x_stride, split, splits, BLOCKS, ACTIVATIONS, DTYPE,
                               INTERPRET, OUTPUTS, TOKENS)  # fmt: skip
        finish_tile(gate_total, up_total, bias, partial, tickets, y, plane, row, target, here, outputs, split, splits,
                    y_stride, limit, factor, GATED, GELU, CLIPPED, HAS_BIAS, DTYPE, INTERPRET, OUTPUTS,
                    TOKENS)  # fmt: skip


def matmul(
    x: Tensor,
    weight: GroupedEightBit,
    routes: Routes,
    config: TileConfig,
    activation: str | None = None,
    clip: Clip | None = None,
) -> Tensor:
    """As `GroupedWeight.matmul`, in x's dtype."""
    first, card = weight.first, card_of(x.device)
    launch = prepare_launch(x, weight, routes, config, activation, clip, first.rows, first.columns // CHUNK)
    if routes.pairs == 0:
        return launch.y
    emulated = first.code_type == "fp8" and card is not NO_GPU and not card.has_float8
    rows = None
    if first.activations in _ROUNDED_BEFORE:
        rows = quantize_rows(x, first, emulated=emulated, outliers_copied=False)
    _grouped_eight_bit[launch.grid](
        x,
        rows.codes if rows else None,
        rows.scales if rows else None,
        rows.outliers if rows else None,
        weight.values.view(torch.uint8) if emulated else weight.values,
        weight.scales,
        weight.input_scales,
        first.columns,
        most_outliers(first.inputs),
        x.shape[0],
        first.values.numel(),
        first.scales.numel(),
        *launch.arguments,
        FLOAT8=first.code_type == "fp8",
        BLOCKS=first.scales.ndim == 2,
        ACTIVATIONS=first.activations,
        EMULATED=emulated,
        STREAMED=config.streamed,
        **launch.constants,
    )
    return launch.y
