"""Packed codes times tokens in float8: codes are exact in it, so nothing but the inputs is rounded.

Layout   x [tokens, inputs] bfloat16 or float16, rows contiguous; weight as in `weight.py`; y [tokens, outputs]
Meaning  `reference.linear.linear` with inputs rounded by token (`quantize_rows.py`) and the weight as it is decoded
Limits   codes of 2 to 4 bits less their zero points, and the values of e2m1: all have the 4 significant bits of e4m3.
         Groups of 32 inputs and more; any number of tokens, but made for 64 and more

As in `skinny.py` the weight is the left operand, and programs may share a tile by splitting the inputs. Codes become
float16 and then float8 in registers. Each group has sums of its own, which are scaled in float32: no more than 128
products are summed by the matrix units of FP8, which keep fewer bits than float32 has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.card import card_of
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.linear.arguments import check_arguments
from quantkit.kernels.linear.dot import dot
from quantkit.kernels.linear.eight_bit.quantize_rows import quantize_rows
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.splits import add_in_order, cut, store_tile
from quantkit.kernels.linear.weight import CHUNK
from quantkit.kernels.linear.weight_only.assembly import PTX, TRITON, assembly
from quantkit.kernels.linear.weight_only.unpack import decode_slabs, load_offset, load_scales, load_zeros, operand
from quantkit.kernels.linear.weight_only.weight import PackedWeight

NAME = "matmul of codes in FP8"
EXACT = ("int2", "int3", "int4", "e2m1")
CHANGING = ("tokens", "chunks", "per_split", "splits")  # from call to call: not worth a compilation each
_LEAST_GROUP = 32  # inputs of one instruction


@dataclass(frozen=True)
class CodesConfig:
    """How the work is cut; `splits` is how many programs share the inputs of one tile."""

    outputs: int = 128
    tokens: int = 128
    warps: int = 8
    stages: int = 3
    splits: int = 1


# None spills on a card with FP8, as they are compiled; nobody has timed them.
TRIED = (CodesConfig(128, 128, 8, 3), CodesConfig(64, 128, 4, 4), CodesConfig(128, 64, 4, 4), CodesConfig(64, 64, 4, 4))


def supports(weight: PackedWeight) -> bool:
    return weight.code_type in EXACT and weight.group >= _LEAST_GROUP


@triton.jit(do_not_specialize=CHANGING)
def _float8_codes(
    codes,
    code_scales,
    words,
    high,
    scales,
    zeros,
    nested,
    nested_table,
    nested_scales,
    nested_offsets,
    table,
    bias,
    y,
    partial,
    tickets,
    tokens,
    outputs,
    inputs,
    rows,
    chunks,
    per_split,
    splits,
    y_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NESTED_EVERY: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    here = token < tokens
    WIDTH: tl.constexpr = GROUP if GROUP < 128 else 128  # inputs of one chunk that share a scale
    column = tl.arange(0, WIDTH)
    groups = 1 if ONE_GROUP else (inputs + GROUP - 1) // GROUP
    acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    first = split * per_split
    end = tl.minimum(first + per_split, chunks)
    wait_for_last(CHAINED)
    stored = nested if NESTED_EVERY > 0 else scales
    nested_offset = load_offset(nested_offsets, tl.program_id(1) * OUTPUTS, OUTPUTS, NESTED_EVERY)
    tile = codes + token[None, :].to(tl.int64) * (chunks * 128)
    for chunk in range(first, end):
        place = (chunk * rows + row[:, None]) * 16 + tl.arange(0, 16)[None, :]
        packed = tl.load(words + place, eviction_policy="evict_first")
        above = packed
        if KIND == "int3":
            above = tl.load(high + place, eviction_policy="evict_first")
        origins = load_zeros(zeros, chunk, row, rows, GROUP, ONE_GROUP, HAS_ZEROS)
        slabs = decode_slabs(packed, above, origins, table, KIND, MIDDLE, tl.float16, ASM, CONSTRAINTS, INTERPRET)
        factors = load_scales(stored, nested_table, nested_scales, nested_offset, chunk, row, rows, groups, GROUP,
                              ONE_GROUP, NESTED_EVERY)  # fmt: skip
        for part in tl.static_range(128 // WIDTH):
            at = chunk * 128 + part * WIDTH + column
            value = tl.load(tile + at[:, None], mask=here[None, :], other=0.0)  # [WIDTH, TOKENS]
            weight = operand(slabs, part, WIDTH, OUTPUTS).to(tl.float8e4nv)
            acc += dot(weight, value, INTERPRET) * factors[part][:, None]
    acc *= tl.load(code_scales + token, mask=here, other=0.0)[None, :]
    acc, last = add_in_order(acc, partial, tickets, split, splits, OUTPUTS, TOKENS)
    if last:
        store_tile(acc, bias, y, row, token, tokens, outputs, y_stride, HAS_BIAS, DTYPE, INTERPRET)


def matmul(
    x: Tensor, weight: PackedWeight, config: CodesConfig, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """y [tokens, outputs] in x's dtype."""
    check_arguments(NAME, x, weight, bias, out)
    if not supports(weight):
        raise InputError(
            f"{NAME}: {weight.kind} is not exact in float8; use codes of 2 to 4 bits in groups of 32 or more"
        )
    y = x.new_empty(x.shape[0], weight.outputs) if out is None else out
    if x.shape[0] == 0:
        return y
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    rounded = quantize_rows(x, _for_tokens(weight))
    shared = cut(NAME, x.shape[0], weight.outputs, weight.rows, weight.chunks, config, x.device)
    fused = not card_of(x.device).adds_bfloat16
    kind = (weight.code_type, PTX[torch.float16], weight.table_values, weight.zero_points)
    text, constraints = assembly(*kind, fused=fused)
    _float8_codes[shared.grid](
        rounded.codes,
        rounded.scales,
        *weight.arguments(),
        bias,
        y,
        shared.partial,
        weight.tickets,
        x.shape[0],
        weight.outputs,
        weight.inputs,
        weight.rows,
        weight.chunks,
        shared.per_split,
        shared.grid[2],
        y.stride(0),
        **weight.constants(),
        MIDDLE=weight.middle,
        HAS_BIAS=bias is not None,
        ASM=text,
        CONSTRAINTS=constraints,
        DTYPE=TRITON[x.dtype],
        INTERPRET=triton.knobs.runtime.interpret,
        OUTPUTS=config.outputs,
        TOKENS=config.tokens,
        **chained(x.device),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return y


def _for_tokens(weight: PackedWeight) -> EightBitWeight:
    """What `quantize_rows` looks at: as many columns, no rows."""
    none = torch.empty(0, weight.chunks * CHUNK, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(0, dtype=torch.float32, device=weight.device)
    return EightBitWeight(weight.outputs, weight.inputs, none, scales, "token", math.inf, None, weight.tickets)
