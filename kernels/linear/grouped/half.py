"""Routed matmul of weights in 16 bits: those of a model that is not quantized, or planes that were decoded for prompts.

Layout   x as `tile.py` says, in the dtype of the weight; weight as in `weight.py`; routes as in `routes.py`
Meaning  x @ plane.T + bias of each expert, accumulated in float32; with an activation
         `reference.elementwise.gated_activation`
Limits   any number of pairs
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.chain import wait_for_last
from quantkit.kernels.checks import check_dtype
from quantkit.kernels.linear.grouped.routes import Routes
from quantkit.kernels.linear.grouped.tile import (
    CHANGING,
    NAME,
    TileConfig,
    dot,
    finish_tile,
    pairs_of_program,
    prepare_launch,
    rows_of_tile,
)
from quantkit.kernels.linear.grouped.weight import Clip, GroupedHalf
from quantkit.kernels.linear.weight import padded


@triton.jit
def _load_weight(rows, column, inputs, WHOLE_STEPS: tl.constexpr, STREAMED: tl.constexpr):
    place = rows + column[None, :]
    if WHOLE_STEPS and STREAMED:
        return tl.load(place, eviction_policy="evict_first")
    elif WHOLE_STEPS:
        return tl.load(place)
    else:
        return tl.load(place, mask=(column < inputs)[None, :], other=0.0)


@triton.jit(do_not_specialize=CHANGING)
def _grouped_half(
    x,
    weights,
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
    WHOLE_STEPS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
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
    DEPTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(2)
    step = tl.arange(0, DEPTH)
    wait_for_last(CHAINED)
    expert, start, end, ranks = pairs_of_program(order, tiles, most, LISTED, BY_PAIR, FIRST, END, CHOICES)
    plane = expert * 2 if GATED else expert
    own = row if WHOLE_TILES else tl.minimum(row, outputs - 1)  # the last row again instead of the next plane's
    rows = weights + plane.to(tl.int64) * outputs * inputs + own[:, None] * inputs
    up_rows = weights + (plane + 1).to(tl.int64) * outputs * inputs + own[:, None] * inputs
    first = split * per_split
    for begin in range(start, end, TOKENS):
        source, target, here = rows_of_tile(order, tiles, most, begin, ranks, PER_TOKEN, GATED, LISTED, TOKENS, CHOICES)
        x_rows = x + (source * x_stride)[None, :]
        acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        up = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for position in range(first, tl.minimum(first + per_split, steps)):
            column = position * DEPTH + step
            weight = _load_weight(rows, column, inputs, WHOLE_STEPS, STREAMED)
            mask = here[None, :]
            if not WHOLE_STEPS:
                mask = mask & (column < inputs)[:, None]
            value = tl.load(x_rows + column[:, None], mask=mask, other=0.0)  # [DEPTH, TOKENS]
            acc = dot(weight, value, acc, INTERPRET)
            if GATED:
                weight = _load_weight(up_rows, column, inputs, WHOLE_STEPS, STREAMED)
                up = dot(weight, value, up, INTERPRET)
        finish_tile(acc, up, bias, partial, tickets, y, plane, row, target, here, outputs, split, splits, y_stride,
                    limit, factor, GATED, GELU, CLIPPED, HAS_BIAS, DTYPE, INTERPRET, OUTPUTS, TOKENS)  # fmt: skip


def matmul(
    x: Tensor,
    weight: GroupedHalf,
    routes: Routes,
    config: TileConfig,
    activation: str | None = None,
    clip: Clip | None = None,
) -> Tensor:
    """As `GroupedWeight.matmul`, in x's dtype, which must be the weight's."""
    check_dtype(NAME, "x", x, (weight.values.dtype,))
    steps, rows = triton.cdiv(weight.inputs, config.depth), padded(weight.outputs, config.outputs)
    launch = prepare_launch(x, weight, routes, config, activation, clip, rows, steps)
    if routes.pairs > 0:
        _grouped_half[launch.grid](
            x,
            weight.values,
            *launch.arguments,
            WHOLE_STEPS=weight.inputs % config.depth == 0,
            WHOLE_TILES=rows == weight.outputs,
            STREAMED=config.streamed,
            DEPTH=config.depth,
            **launch.constants,
        )
    return launch.y
