"""Routed weight-only matmul: every tile of pairs is multiplied with its own expert's codes, decoded in registers.

Layout   x as `tile.py` says, bfloat16 or float16; weight as in `weight.py`; routes as in `routes.py`
Meaning  `reference.linear.linear` of each expert; with an activation `reference.elementwise.gated_activation` after it
Limits   any number of pairs, but made for few of an expert: every tile reads the weight once more

The loop is that of `weight_only/skinny.py`. Under act-order each plane gathers its inputs in an order of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.card import card_of
from quantkit.kernels.chain import wait_for_last
from quantkit.kernels.linear.grouped.planes import decode_plane, scales_of_plane
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
from quantkit.kernels.linear.grouped.weight import Clip, GroupedPacked
from quantkit.kernels.linear.weight import CHUNK
from quantkit.kernels.linear.weight_only.assembly import PTX, assembly, pair_table
from quantkit.kernels.linear.weight_only.static_shared import allow_tables
from quantkit.kernels.linear.weight_only.unpack import operand, place_pairs


@triton.jit
def _load_x(x, rows_of_x, orders, plane, at, here, inputs, HAS_ORDER: tl.constexpr, WHOLE_CHUNKS: tl.constexpr):
    """x [DEPTH, TOKENS] at these inputs of a plane."""
    mask = here[None, :]
    if not WHOLE_CHUNKS:
        mask = mask & (at < inputs)[:, None]
    if HAS_ORDER:
        at = tl.load(orders + plane.to(tl.int64) * inputs + at, mask=at < inputs, other=0)
    return tl.load(x + rows_of_x[None, :] + at[:, None], mask=mask, other=0.0)


@triton.jit(do_not_specialize=CHANGING)
def _grouped_packed(
    x,
    words,
    high,
    scales,
    zeros,
    nested,
    nested_table,
    nested_scales,
    nested_offsets,
    table,
    orders,
    rows,
    words_of_plane,
    stored_of_plane,
    zeros_of_plane,
    second_of_plane,
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
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    NESTED_EVERY: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
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
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    first_row = tl.program_id(1) * OUTPUTS
    row = first_row + tl.arange(0, OUTPUTS)
    split = tl.program_id(2)
    place_pairs(PAIRS)
    wait_for_last(CHAINED)
    expert, start, end, ranks = pairs_of_program(order, tiles, most, LISTED, BY_PAIR, FIRST, END, CHOICES)
    plane = expert * 2 if GATED else expert
    WIDTH: tl.constexpr = GROUP if GROUP < 128 else 128  # inputs of one chunk that share a scale
    column = tl.arange(0, WIDTH)
    groups = 1 if ONE_GROUP else (inputs + GROUP - 1) // GROUP
    stored = nested if NESTED_EVERY > 0 else scales
    first = split * per_split
    for begin in range(start, end, TOKENS):
        source, target, here = rows_of_tile(order, tiles, most, begin, ranks, PER_TOKEN, GATED, LISTED, TOKENS, CHOICES)
        source *= x_stride
        acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        up = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for chunk in range(first, tl.minimum(first + per_split, steps)):
            slabs = decode_plane(words, high, zeros, table, plane, chunk, row, rows, words_of_plane, zeros_of_plane,
                                 KIND, GROUP, ONE_GROUP, MIDDLE, HAS_ZEROS, ASM, CONSTRAINTS, DTYPE,
                                 INTERPRET)  # fmt: skip
            if not ONE_GROUP:
                factors = scales_of_plane(stored, nested_table, nested_scales, nested_offsets, plane, chunk, row,
                                          first_row, rows, groups, stored_of_plane, second_of_plane, GROUP, ONE_GROUP,
                                          NESTED_EVERY, OUTPUTS)  # fmt: skip
            if GATED:
                up_slabs = decode_plane(words, high, zeros, table, plane + 1, chunk, row, rows, words_of_plane,
                                        zeros_of_plane, KIND, GROUP, ONE_GROUP, MIDDLE, HAS_ZEROS, ASM, CONSTRAINTS,
                                        DTYPE, INTERPRET)  # fmt: skip
                if not ONE_GROUP:
                    up_factors = scales_of_plane(stored, nested_table, nested_scales, nested_offsets, plane + 1, chunk,
                                                 row, first_row, rows, groups, stored_of_plane, second_of_plane, GROUP,
                                                 ONE_GROUP, NESTED_EVERY, OUTPUTS)  # fmt: skip
            for part in tl.static_range(128 // WIDTH):
                at = chunk * 128 + part * WIDTH + column
                values = _load_x(x, source, orders, plane, at, here, inputs, HAS_ORDER, WHOLE_CHUNKS)
                weight = operand(slabs, part, WIDTH, OUTPUTS)
                if ONE_GROUP:
                    acc = dot(weight, values, acc, INTERPRET)
                else:
                    acc += dot(weight, values, None, INTERPRET) * factors[part][:, None]
                if GATED:
                    if HAS_ORDER:
                        values = _load_x(x, source, orders, plane + 1, at, here, inputs, HAS_ORDER, WHOLE_CHUNKS)
                    weight = operand(up_slabs, part, WIDTH, OUTPUTS)
                    if ONE_GROUP:
                        up = dot(weight, values, up, INTERPRET)
                    else:
                        up += dot(weight, values, None, INTERPRET) * up_factors[part][:, None]
        if ONE_GROUP:
            factors = scales_of_plane(stored, nested_table, nested_scales, nested_offsets, plane, 0, row, first_row,
                                      rows, 1, stored_of_plane, second_of_plane, GROUP, True, NESTED_EVERY,
                                      OUTPUTS)  # fmt: skip
            acc *= factors[0][:, None]
            if GATED:
                factors = scales_of_plane(stored, nested_table, nested_scales, nested_offsets, plane + 1, 0, row,
                                          first_row, rows, 1, stored_of_plane, second_of_plane, GROUP, True,
                                          NESTED_EVERY, OUTPUTS)  # fmt: skip
                up *= factors[0][:, None]
        finish_tile(acc, up, bias, partial, tickets, y, plane, row, target, here, outputs, split, splits, y_stride,
                    limit, factor, GATED, GELU, CLIPPED, HAS_BIAS, DTYPE, INTERPRET, OUTPUTS, TOKENS)  # fmt: skip


allow_tables("_grouped_packed")


def matmul(
    x: Tensor,
    weight: GroupedPacked,
    routes: Routes,
    config: TileConfig,
    activation: str | None = None,
    clip: Clip | None = None,
) -> Tensor:
    """As `GroupedWeight.matmul`, in x's dtype."""
    first = weight.first
    launch = prepare_launch(x, weight, routes, config, activation, clip, first.rows, first.chunks)
    if routes.pairs == 0:
        return launch.y
    copies = 0 if first.table is None or triton.knobs.runtime.interpret else config.copies
    fused = not card_of(x.device).adds_bfloat16
    text, constraints = assembly(first.code_type, PTX[x.dtype], first.table_values, first.zero_points, copies, fused)
    _grouped_packed[launch.grid](
        x,
        *first.arguments(),
        first.order,
        first.rows,
        *weight.strides(),
        *launch.arguments,
        **first.constants(),
        MIDDLE=first.middle,
        HAS_ORDER=first.order is not None,
        WHOLE_CHUNKS=weight.inputs % CHUNK == 0,
        ASM=text,
        CONSTRAINTS=constraints,
        PAIRS=pair_table(PTX[x.dtype], first.table_values, copies, 32 * config.warps) if copies else "",
        **launch.constants,
    )
    return launch.y
