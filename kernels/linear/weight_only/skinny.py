"""Weight-only matmul for few tokens: codes become tensor-core operands in registers, and never touch memory decoded.

Layout   x [tokens, inputs] bfloat16 or float16, rows contiguous; weight as in `weight.py`; y [tokens, outputs]
Meaning  `reference.linear.linear`: y = x @ dequantize(weight).T + bias, accumulated in float32
Limits   any number of tokens, but made for 1 to about 128: every tile of tokens reads the weight once more

The weight is the left operand (y^T = W x^T): on Hopper that is wgmma with its left side in registers. Programs share a
tile of outputs by splitting the inputs; each stores its part, takes a ticket, and the last one adds the parts in order,
so that results do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.card import card_of
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.linear.arguments import check_arguments
from quantkit.kernels.linear.splits import add_in_order, cut, store_tile
from quantkit.kernels.linear.weight import CHUNK, Kernel
from quantkit.kernels.linear.weight_only.assembly import PTX, TRITON, assembly, pair_table
from quantkit.kernels.linear.weight_only.static_shared import allow_tables
from quantkit.kernels.linear.weight_only.unpack import (
    decode_slabs,
    finish_scales,
    load_offset,
    load_scales,
    load_stored,
    load_zeros,
    multiply,
    operand,
    place_pairs,
    to_half,
)
from quantkit.kernels.linear.weight_only.weight import PackedWeight

NAME = "weight-only matmul"

CHANGING = ("tokens", "chunks", "per_split", "splits")  # from call to call: not worth a compilation each


@dataclass(frozen=True)
class SkinnyConfig:
    """How the work is cut; `splits` is how many programs share the inputs of one tile."""

    outputs: int = 64
    tokens: int = 16
    warps: int = 4
    stages: int = 4
    splits: int = 1
    scale_first: bool = False  # scale the operands (16 bit) instead of the products (float32)
    copies: int = 0  # of the table of pairs in shared memory (nf4, fp4): 4, 8, 16, 32; 0: values by byte permutes
    sums: int = 1  # of the inputs of a chunk that share a scale: a product waits for those of its own sum only

    @property
    def depth(self) -> int:
        """Inputs of a step."""
        return CHUNK


@triton.jit
def _dot(weight, x, acc, INTERPRET: tl.constexpr):
    if INTERPRET:  # where products of bfloat16 are wrong
        return tl.dot(weight.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(weight, x, acc)


@triton.jit(do_not_specialize=CHANGING)
def _skinny(
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
    x_stride,
    y_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NESTED_EVERY: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
    PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
    SUMS: tl.constexpr,
):
    row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    here = token < tokens
    lane = tl.arange(0, 16)
    WIDTH: tl.constexpr = GROUP if GROUP < 128 else 128  # inputs of one chunk that share a scale
    DEPTH: tl.constexpr = 128 if SCALE_FIRST else WIDTH // SUMS
    column = tl.arange(0, DEPTH)
    groups = 1 if ONE_GROUP else (inputs + GROUP - 1) // GROUP
    acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    first = split * per_split
    end = tl.minimum(first + per_split, chunks)
    stored = nested if NESTED_EVERY > 0 else scales
    place_pairs(PAIRS)
    wait_for_last(CHAINED)
    nested_offset = load_offset(nested_offsets, tl.program_id(1) * OUTPUTS, OUTPUTS, NESTED_EVERY)
    if EARLY:
        early = load_stored(stored, first, row, rows, GROUP, False)
    for chunk in range(first, end):
        place = (chunk * rows + row[:, None]) * 16 + lane[None, :]
        packed = tl.load(words + place, eviction_policy="evict_first")
        above = packed
        if KIND == "int3" or KIND == "int8":
            above = tl.load(high + place, eviction_policy="evict_first")
        if EARLY:
            factors = finish_scales(early, nested_table, nested_scales, nested_offset, chunk, row, groups, GROUP, False,
                                    NESTED_EVERY, WHOLE_CHUNKS)  # fmt: skip
            early = load_stored(stored, tl.minimum(chunk + 1, end - 1), row, rows, GROUP, False)
        else:
            factors = load_scales(stored, nested_table, nested_scales, nested_offset, chunk, row, rows, groups, GROUP,
                                  ONE_GROUP, NESTED_EVERY)  # fmt: skip
        origins = load_zeros(zeros, chunk, row, rows, GROUP, ONE_GROUP, HAS_ZEROS)
        slabs = decode_slabs(packed, above, origins, table, KIND, MIDDLE, DTYPE, ASM, CONSTRAINTS, INTERPRET)
        if SCALE_FIRST:
            slabs = _scale_slabs(slabs, factors, WIDTH, OUTPUTS, DTYPE, INTERPRET)
        for part in tl.static_range(128 // DEPTH):
            at = chunk * 128 + part * DEPTH + column
            mask = here[None, :]
            if not WHOLE_CHUNKS:
                mask = mask & (at < inputs)[:, None]
            values = tl.load(x + token[None, :] * x_stride + at[:, None], mask=mask, other=0.0)  # [DEPTH, TOKENS]
            weight = operand(slabs, part, DEPTH, OUTPUTS)
            if SCALE_FIRST or ONE_GROUP:
                acc = _dot(weight, values, acc, INTERPRET)
            else:
                acc += _dot(weight, values, None, INTERPRET) * factors[part // SUMS][:, None]
    if ONE_GROUP and not SCALE_FIRST:
        factors = load_scales(stored, nested_table, nested_scales, nested_offset, 0, row, rows, 1, GROUP, True,
                              NESTED_EVERY)  # fmt: skip
        acc *= factors[0][:, None]
    acc, last = add_in_order(acc, partial, tickets, split, splits, OUTPUTS, TOKENS)
    if last:
        store_tile(acc, bias, y, row, token, tokens, outputs, y_stride, HAS_BIAS, DTYPE, INTERPRET)


allow_tables("_skinny")


@triton.jit
def _scale_slabs(
    slabs, factors, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, DTYPE: tl.constexpr, INTERPRET: tl.constexpr
):
    """Slabs times the scale of their group, in 16 bit."""
    done = ()
    for part in tl.static_range(128 // WIDTH):
        factor = tl.broadcast_to(to_half(factors[part], DTYPE, INTERPRET)[:, None], (OUTPUTS, 16))
        for slab in tl.static_range(WIDTH // 16):
            done += (multiply(slabs[part * (WIDTH // 16) + slab], factor, DTYPE, INTERPRET),)  # type: ignore[assignment]
    return done


def matmul(
    x: Tensor, weight: PackedWeight, config: SkinnyConfig, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """y [tokens, outputs] in x's dtype."""
    check_arguments(NAME, x, weight, bias, out)
    tokens = x.shape[0]
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    y = x.new_empty(tokens, weight.outputs) if out is None else out
    if tokens == 0:
        return y
    if tokens * x.stride(0) >= 1 << 31:
        raise InputError(f"{NAME}: {tokens} tokens of {x.stride(0)} are too many for 32-bit places; decode the weight")
    shared = cut(NAME, tokens, weight.outputs, weight.rows, weight.chunks, config, x.device)
    copies = 0 if weight.table is None or triton.knobs.runtime.interpret else config.copies
    fused = not card_of(x.device).adds_bfloat16
    text, constraints = assembly(weight.code_type, PTX[x.dtype], weight.table_values, weight.zero_points, copies, fused)
    pairs = pair_table(PTX[x.dtype], weight.table_values, copies, 32 * config.warps) if copies else ""
    _skinny[shared.grid](
        x,
        *weight.arguments(),
        bias,
        y,
        shared.partial,
        weight.tickets,
        tokens,
        weight.outputs,
        weight.inputs,
        weight.rows,
        weight.chunks,
        shared.per_split,
        shared.grid[2],
        x.stride(0),
        y.stride(0),
        **weight.constants(),
        MIDDLE=weight.middle,
        HAS_BIAS=bias is not None,
        WHOLE_CHUNKS=weight.inputs % 128 == 0,
        SCALE_FIRST=config.scale_first,
        ASM=text,
        CONSTRAINTS=constraints,
        DTYPE=TRITON[x.dtype],
        INTERPRET=triton.knobs.runtime.interpret,
        OUTPUTS=config.outputs,
        TOKENS=config.tokens,
        **chained(x.device),
        PAIRS=pairs,
        EARLY=_scales_early(weight),
        SUMS=config.sums,
        num_warps=config.warps,
        num_stages=config.stages,
        **_registers(config),
    )
    return y


def _scales_early(weight: PackedWeight) -> bool:
    """Bytes of nested scales are not copied ahead, and lead to a second load: they are read one chunk early."""
    return weight.nested is not None and not weight.one_group


def _registers(config: SkinnyConfig) -> dict[str, int]:
    """At most 128 a thread where that lets two programs of 8 warps share a multiprocessor, 80 for three with tables.

    NF4 takes 132 by itself at 128 x 64: one program, and 96 us instead of 65 for gate_up with 64 tokens on an H200.
    """
    if triton.knobs.runtime.interpret or config.warps != 8 or config.outputs * config.tokens > 128 * 64:
        return {}
    return {"maxnreg": 80 if config.copies and config.outputs * config.tokens <= 128 * 16 else 128}


KERNEL = Kernel("skinny", matmul, SkinnyConfig)
