"""All planes of packed experts written out in 16 bits, in one launch, for prompts: their tokens pay for it.

Layout   weight as in `weight.py` -> `GroupedHalf`; under act-order the columns are in the layer's own order
Meaning  `QuantizedWeight.dequantize` of each plane; NF4 and FP4 values are rounded to 16 bits before they are scaled
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit.kernels.card import card_of
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.checks import HALVES, check_dtype
from quantkit.kernels.linear.grouped.planes import decode_plane, scales_of_plane
from quantkit.kernels.linear.grouped.weight import GroupedHalf, GroupedPacked
from quantkit.kernels.linear.weight_only.assembly import PTX, TRITON, assembly
from quantkit.kernels.linear.weight_only.unpack import operand, to_half

NAME = "decoding of experts"
_ROWS = 64  # outputs of a program


@triton.jit
def _decode_planes(
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
    out,
    outputs,
    inputs,
    rows,
    words_of_plane,
    stored_of_plane,
    zeros_of_plane,
    second_of_plane,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    NESTED_EVERY: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    plane, chunk = tl.program_id(0), tl.program_id(2)
    first_row = tl.program_id(1) * ROWS
    row = first_row + tl.arange(0, ROWS)
    WIDTH: tl.constexpr = GROUP if GROUP < 128 else 128
    column = tl.arange(0, WIDTH)
    wait_for_last(CHAINED)  # who reads `out` may still be at work
    slabs = decode_plane(words, high, zeros, table, plane, chunk, row, rows, words_of_plane, zeros_of_plane, KIND,
                         GROUP, ONE_GROUP, MIDDLE, HAS_ZEROS, ASM, CONSTRAINTS, DTYPE, INTERPRET)  # fmt: skip
    groups = 1 if ONE_GROUP else inputs // GROUP
    factors = scales_of_plane(nested if NESTED_EVERY > 0 else scales, nested_table, nested_scales, nested_offsets,
                              plane, chunk, row, first_row, rows, groups, stored_of_plane, second_of_plane, GROUP,
                              ONE_GROUP, NESTED_EVERY, ROWS)  # fmt: skip
    begin = out + plane.to(tl.int64) * outputs * inputs
    for part in tl.static_range(128 // WIDTH):
        at = chunk * 128 + part * WIDTH + column
        value = operand(slabs, part, WIDTH, ROWS).to(tl.float32) * factors[part][:, None]
        mask = (row < outputs)[:, None] & (at < inputs)[None, :]
        if HAS_ORDER:
            at = tl.load(orders + plane.to(tl.int64) * inputs + at, mask=at < inputs, other=0)
        tl.store(begin + row[:, None] * inputs + at[None, :], to_half(value, DTYPE, INTERPRET), mask=mask)


def decode(weight: GroupedPacked, dtype: torch.dtype) -> GroupedHalf:
    first = weight.first
    values = torch.empty(weight.count, weight.outputs, weight.inputs, dtype=dtype, device=weight.device)
    check_dtype(NAME, "result", values, HALVES)
    fused = not card_of(weight.device).adds_bfloat16
    text, constraints = assembly(first.code_type, PTX[dtype], first.table_values, first.zero_points, fused=fused)
    _decode_planes[(weight.count, triton.cdiv(weight.outputs, _ROWS), first.chunks)](
        *first.arguments(),
        first.order,
        values,
        weight.outputs,
        weight.inputs,
        first.rows,
        *weight.strides(),
        **first.constants(),
        MIDDLE=first.middle,
        HAS_ORDER=first.order is not None,
        ASM=text,
        CONSTRAINTS=constraints,
        DTYPE=TRITON[dtype],
        INTERPRET=triton.knobs.runtime.interpret,
        ROWS=_ROWS,
        num_warps=4,
        **chained(weight.device),
    )
    return GroupedHalf(values, weight.tickets, weight.bias)
