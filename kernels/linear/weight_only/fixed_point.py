"""Few tokens times packed codes on the matrix units for integers: codes of 4 and 8 bits need hardly any decoding there.

Layout   x [tokens, inputs] bfloat16 or float16, rows contiguous; weight as in `weight.py`; y [tokens, outputs]
Meaning  `reference.fixed_point.linear`: `reference.linear.linear` of tokens in fixed point
Limits   integers of 4 or 8 bits with at most one scale and zero point for 128 inputs; any number of tokens, but made
         for 1 to about 16

A launch before the product turns every 128 inputs of a token into whole numbers of 16 bits times a scale, which is
finer than bfloat16 for all but inputs far below the largest of the 128. Each number is two bytes, x = 256 high + low,
so two products of bytes give its product with codes, exactly. Codes of 4 bits are multiplied as 16 (code - 8).

Bytes of a word become bytes of an operand without moving: a product does not care in which order its inputs come, and
`_places` is the order that this makes. Tokens are stored in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.digits import times_digits, two_digits
from quantkit.kernels.linear.arguments import check_arguments
from quantkit.kernels.linear.splits import add_in_order, cut, store_tile
from quantkit.kernels.linear.weight import CHUNK, Kernel
from quantkit.kernels.linear.weight_only.assembly import TRITON
from quantkit.kernels.linear.weight_only.weight import PackedWeight

NAME = "weight-only matmul in fixed point"
CHANGING = ("tokens", "chunks", "per_split", "splits")  # from call to call: not worth a compilation each
_CHUNKS_OF_PROGRAM = 8  # that one program turns into fixed point
# The high half of every byte as 16 (code - 8): (word & 0xF0F0F0F0) ^ 0x80808080 in one instruction.
_CENTRED = tl.constexpr("lop3.b32 $0, $1, 0xF0F0F0F0, 0x80808080, 0x6A;")
_HIGH_HALVES = tl.constexpr(0xF0F0F0F0 - (1 << 32))
_SIGNS = tl.constexpr(0x80808080 - (1 << 32))


@dataclass(frozen=True)
class FixedPointConfig:
    """How the work is cut; `splits` is how many programs share the inputs of one tile."""

    outputs: int = 64
    tokens: int = 8
    warps: int = 4
    stages: int = 3
    splits: int = 1


# Compiled without spilling; nobody has timed them.
TRIED = (
    FixedPointConfig(32, 8, 2, 3),
    FixedPointConfig(64, 8, 4, 3),
    FixedPointConfig(64, 8, 2, 3),
    FixedPointConfig(128, 8, 4, 3),
    FixedPointConfig(64, 8, 4, 4),
)
MOST_TOKENS = 8  # of a bucket that it is tried for


def supports(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> bool:
    return weight.code_type in ("int4", "int8") and (weight.one_group or weight.group % CHUNK == 0)


@triton.jit
def _places(KIND: tl.constexpr):
    """Which of a chunk's inputs stands at each of its 128 places: as `_load_codes` puts them."""
    place = tl.arange(0, 128)
    byte, word, lane = place & 3, (place >> 2) & 1, 4 * ((place >> 3) & 3) + (place >> 5)
    slab = 2 * byte + word if KIND == "int4" else 4 * word + byte
    return 16 * slab + lane


@triton.jit(do_not_specialize=("chunks",))
def _to_fixed_point(
    x, codes, scales, sums, inputs, chunks, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    """Program (i, j) writes the j-th BLOCK chunks of token i."""
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = chunk[:, None] * 128 + _places(KIND)[None, :]
    wait_for_last(CHAINED)
    value = tl.load(x + token * x_stride + column, mask=column < inputs, other=0.0).to(tl.float32)
    high, low, step, total = two_digits(value, 1)
    here = chunk < chunks
    at = codes + (token * chunks + chunk)[:, None] * 256 + tl.arange(0, 128)[None, :]
    tl.store(at, high, mask=here[:, None])
    tl.store(at + 128, low, mask=here[:, None])
    tl.store(scales + token * chunks + chunk, step, mask=here)
    tl.store(sums + token * chunks + chunk, total, mask=here)


@triton.jit
def _load_codes(words, high, first, KIND: tl.constexpr, ROWS: tl.constexpr, INTERPRET: tl.constexpr):
    """int8 [ROWS, 128] of a chunk, from where the words of its rows begin. Every byte stays in its thread."""
    place = first[:, None] + tl.arange(0, 16)[None, :]
    packed = tl.load(words + place, eviction_policy="evict_first")
    if KIND == "int4":
        pair = tl.join(_bytes(_centred(packed << 4, INTERPRET)), _bytes(_centred(packed, INTERPRET)))
    else:
        pair = tl.join(_bytes(packed), _bytes(tl.load(high + place, eviction_policy="evict_first")))
    lanes = tl.reshape(pair, (ROWS, 4, 4, 4, 2))  # [row, lane / 4, lane % 4, byte, word of two]
    return tl.reshape(tl.permute(lanes, (0, 2, 1, 4, 3)), (ROWS, 128))


@triton.jit
def _centred(words, INTERPRET: tl.constexpr):
    if INTERPRET:
        return (words & _HIGH_HALVES) ^ _SIGNS
    else:
        return tl.inline_asm_elementwise(_CENTRED, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _bytes(words):
    """[..., 2, 2] of int8, the lowest first; the compiler sees that they are the words as they are."""
    even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    return tl.join(even, odd)


@triton.jit(do_not_specialize=CHANGING)
def _fixed_point(
    codes,
    x_scales,
    x_sums,
    words,
    high,
    scales,
    zeros,
    bias,
    y,
    partial,
    tickets,
    tokens,
    outputs,
    rows,
    chunks,
    per_split,
    splits,
    y_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    seen = tl.minimum(token, tokens - 1).to(tl.int64) * chunks  # a tile's tokens past the last repeat it
    column = tl.arange(0, 128)
    MIDDLE: tl.constexpr = 8 if KIND == "int4" else 128
    STEP: tl.constexpr = 16 if KIND == "int4" else 1
    acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    first = split * per_split
    end = tl.minimum(first + per_split, chunks)
    wait_for_last(CHAINED)
    for chunk in range(first, end):
        weight = _load_codes(words, high, (chunk * rows + row) * 16, KIND, OUTPUTS, INTERPRET)
        group = 0 if ONE_GROUP else chunk * 128 // GROUP
        factor = tl.load(scales + group * rows + row).to(tl.float32)
        x_factor = tl.load(x_scales + seen + chunk)
        tile = codes + (seen + chunk)[None, :] * 256 + column[:, None]  # [128, TOKENS]
        total = times_digits(weight, tl.load(tile), tl.load(tile + 128), INTERPRET)
        if HAS_ZEROS:
            zero = ((tl.load(zeros + group * rows + row) & 255) - MIDDLE) * STEP
            total -= zero[:, None] * tl.load(x_sums + seen + chunk)[None, :]
        acc += total.to(tl.float32) * (factor[:, None] * x_factor[None, :])
    acc *= 1.0 / STEP
    acc, last = add_in_order(acc, partial, tickets, split, splits, OUTPUTS, TOKENS)
    if last:
        store_tile(acc, bias, y, row, token, tokens, outputs, y_stride, HAS_BIAS, DTYPE, INTERPRET)


@dataclass(frozen=True)
class FixedPointTokens:
    """Tokens as the product reads them."""

    codes: Tensor  # int8 [tokens, chunks, 2, 128]: high bytes, then low ones
    scales: Tensor  # float32 [tokens, chunks]
    sums: Tensor  # int32 [tokens, chunks], of the whole numbers


def to_fixed_point(x: Tensor, weight: PackedWeight) -> FixedPointTokens:
    tokens, chunks = x.shape[0], weight.chunks
    codes = torch.empty(tokens, chunks, 2, CHUNK, dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, chunks, dtype=torch.float32, device=x.device)
    sums = torch.empty(tokens, chunks, dtype=torch.int32, device=x.device)
    _to_fixed_point[(tokens, triton.cdiv(chunks, _CHUNKS_OF_PROGRAM))](
        x,
        codes,
        scales,
        sums,
        x.shape[1],
        chunks,
        x.stride(0),
        KIND=weight.code_type,
        BLOCK=_CHUNKS_OF_PROGRAM,
        **chained(x.device),
        num_warps=4,
    )
    return FixedPointTokens(codes, scales, sums)


def matmul(
    x: Tensor, weight: PackedWeight, config: FixedPointConfig, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """y [tokens, outputs] in x's dtype."""
    check_arguments(NAME, x, weight, bias, out)
    if not supports(weight):
        raise InputError(f"{NAME}: {weight.kind}; it takes integers of 4 or 8 bits in groups of 128 or more")
    y = x.new_empty(x.shape[0], weight.outputs) if out is None else out
    if x.shape[0] == 0:
        return y
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    fixed = to_fixed_point(x, weight)
    shared = cut(NAME, x.shape[0], weight.outputs, weight.rows, weight.chunks, config, x.device)
    _fixed_point[shared.grid](
        fixed.codes,
        fixed.scales,
        fixed.sums,
        weight.words,
        weight.high,
        weight.scales,
        weight.zeros,
        bias,
        y,
        shared.partial,
        weight.tickets,
        x.shape[0],
        weight.outputs,
        weight.rows,
        weight.chunks,
        shared.per_split,
        shared.grid[2],
        y.stride(0),
        KIND=weight.code_type,
        GROUP=weight.group,
        ONE_GROUP=weight.one_group,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        DTYPE=TRITON[x.dtype],
        INTERPRET=triton.knobs.runtime.interpret,
        OUTPUTS=config.outputs,
        TOKENS=config.tokens,
        **chained(x.device),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return y


KERNEL = Kernel("fixed-point", matmul, FixedPointConfig, supports)
