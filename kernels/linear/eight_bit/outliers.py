"""The columns of activations that LLM.int8 keeps in 16 bit: found, listed, and for many tokens copied side by side.

Layout   x [tokens, inputs] 16 bit, rows contiguous; weights int8 [rows, columns], see `weight.py`
         flags     uint8 [columns], 1 where any token has an outlier
         outliers  int32 [1 + columns]: how many, then which, in ascending order
         dense     inputs [tokens, 64] and weights [rows, 64] in x's dtype: the first 64 of these columns, zero where
                   there are fewer; neither is written where there are none
Limits   at most 65,536 inputs, so that a bit for each fits the weight's tickets

A tile of a product that gathers columns reads 32 bytes of weights for every byte. Copied once, the columns are one more
step of the product; tiles gather only what does not fit, up to `most_outliers` (`many_outliers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.digits import ROUND
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.weight import TICKETS
from quantkit.kernels.linear.weight_only.assembly import TRITON

MOST_INPUTS = 65536
FEW_TOKENS = 64  # up to here copying the columns would cost more than it saves
DENSE = 64  # columns that are copied
assert 1 + MOST_INPUTS // 32 <= TICKETS
_MOST_HELD = 32768  # columns of a row that one program holds in registers; the rest of a longer one is read twice
_GATHERED_ROWS = 64  # of weights, by one program
_MOST_WORDS = tl.constexpr(MOST_INPUTS // 32)


@dataclass(frozen=True)
class _Block:
    """What one program of `_find` looks at, so many tokens at a time.

    At most `shares` programs have the same columns; the one that lists takes so many columns at a time.
    """

    columns: int
    tokens: int
    warps: int
    shares: int
    listed: int = 4096


def _block(tokens: int, columns: int) -> _Block:
    """The fastest of a sweep on an H200 (with listing, 256 tokens of 14,336 columns: the last two 11.0 and 14.5 us)."""
    if tokens <= FEW_TOKENS:
        return _Block(128, 32, 4, shares=2)
    if tokens <= 1024 and columns <= 8192:
        return _Block(64, 64, 4, shares=4)
    if tokens <= 1024:
        return _Block(512, 16, 8, shares=4, listed=16384)
    return _Block(128, 64, 8, shares=8)


@dataclass(frozen=True)
class DenseOutliers:
    """The first outlier columns, side by side."""

    inputs: Tensor  # [tokens, DENSE]
    weights: Tensor  # [rows, DENSE]


@triton.jit
def is_outlier(value, threshold):
    """As bitsandbytes, which sees float16."""
    return (tl.abs(value.to(tl.float16).to(tl.float32)) >= threshold).to(tl.int32)


@triton.jit
def without_outliers(value, found):
    """As bitsandbytes sees the values, 0 where an outlier was `found`."""
    return tl.where(found > 0, 0.0, value.to(tl.float16).to(tl.float32))


@triton.jit
def store_bytes(value, largest, codes, inside):
    """One token's values as signed bytes; `largest` becomes 127."""
    code = value * tl.div_rn(127.0, tl.maximum(largest, 1e-30))
    tl.store(codes, ((code + ROUND) - ROUND).to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=("tokens", "share"))
def _find(
    x,
    flags,
    outliers,
    tickets,
    tokens,
    share,
    inputs,
    columns,
    x_stride,
    threshold,
    LIST: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    LISTED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (i, j) looks at group i of columns in the tokens of share j. Without LIST it stores flags [j, column].

    With LIST the shares meet in bits that are zero between calls, `tickets` [1 + column // 32]. The program that draws
    the last ticket, `tickets` [0], turns them into flags [column] and the list, and leaves zeros. Integers only: the
    order in which programs arrive changes nothing.
    """
    wait_for_last(CHAINED)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * share
    found = tl.zeros((TOKENS, COLUMNS), tl.int32)
    for start in range(first, tl.minimum(first + share, tokens), TOKENS):
        row = (start + tl.arange(0, TOKENS))[:, None]
        mask = (row < tokens) & (column < inputs)[None, :]
        value = tl.load(x + row.to(tl.int64) * x_stride + column[None, :], mask=mask, other=0.0)
        found |= is_outlier(value, threshold)
    any_token = tl.max(found, axis=0)
    if LIST:
        bits = tl.sum(tl.reshape(any_token, (COLUMNS // 32, 32)) << tl.arange(0, 32)[None, :], axis=1)
        word = tl.program_id(0) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
        tl.atomic_or(tickets + 1 + word, bits, mask=bits != 0, sem="relaxed")
        tl.debug_barrier()  # every thread's bits are there before the ticket is taken
        ticket = tl.atomic_add(tickets, 1, sem="acq_rel")
        if ticket == tl.num_programs(0) * tl.num_programs(1) - 1:
            tl.debug_barrier()
            _list(tickets + 1, flags, outliers, columns, LISTED)
            tl.store(tickets, 0)
    else:
        tl.store(flags + tl.program_id(1) * columns + column, any_token.to(tl.uint8), mask=column < columns)


@triton.jit
def _list(bits, flags, outliers, columns, LISTED: tl.constexpr):
    """flags and outliers of a bit per column; the bits are zero afterwards."""
    count = 0
    for first in range(0, columns, LISTED):
        column = first + tl.arange(0, LISTED)
        inside = column < columns
        word = tl.load(bits + column // 32, mask=inside, other=0, cache_modifier=".cg")
        found = (word >> (column % 32)) & 1
        tl.store(flags + column, found.to(tl.uint8), mask=inside)
        tl.store(outliers + count + tl.cumsum(found, axis=0), column, mask=found > 0)
        count += tl.sum(found, axis=0)
    tl.store(outliers, count)
    tl.debug_barrier()  # every thread has read its bits
    word = tl.arange(0, _MOST_WORDS)
    tl.store(bits + word, tl.zeros((_MOST_WORDS,), tl.int32), mask=word < columns // 32)


@triton.jit
def _ordinary(row, flags, column, inputs, columns):
    """Some values of a token, 0 in outlier columns."""
    value = tl.load(row + column, mask=column < inputs, other=0.0)
    return without_outliers(value, tl.load(flags + column, mask=column < columns, other=0))


@triton.jit
def _copy_listed(rows, places, outliers, DTYPE: tl.constexpr, DENSE: tl.constexpr):
    """The first listed columns of `rows` [n, 1], side by side; nothing where none are listed."""
    count = tl.load(outliers)
    if count > 0:
        index = tl.arange(0, DENSE)[None, :]
        listed = tl.load(outliers + 1 + index, mask=index < count, other=0)
        value = tl.load(rows + listed, mask=index < count, other=0)
        tl.store(places + index, value.to(tl.float32).to(DTYPE))


@triton.jit(do_not_specialize=("gathers",))
def _split(
    x,
    weights,
    flags,
    outliers,
    codes,
    scales,
    dense_inputs,
    dense_weights,
    gathers,
    inputs,
    columns,
    x_stride,
    DTYPE: tl.constexpr,
    WIDTH: tl.constexpr,
    DENSE: tl.constexpr,
    ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The first `gathers` programs copy the columns of weights, ROWS each; the others take one token each. Where DENSE
    is 0, nothing is copied."""
    wait_for_last(CHAINED)
    program = tl.program_id(0)
    if program < gathers:
        if DENSE > 0:
            row = (program * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
            _copy_listed(weights + row * columns, dense_weights + row * DENSE, outliers, DTYPE, DENSE)
    else:
        token = (program - gathers).to(tl.int64)
        column = tl.arange(0, WIDTH)
        value = _ordinary(x + token * x_stride, flags, column, inputs, columns)
        largest = tl.max(tl.abs(value), axis=0)
        for start in range(WIDTH, columns, WIDTH):  # of a row that one program cannot hold
            rest = _ordinary(x + token * x_stride, flags, start + column, inputs, columns)
            largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=0))
        store_bytes(value, largest, codes + token * columns + column, column < columns)
        for start in range(WIDTH, columns, WIDTH):
            rest = _ordinary(x + token * x_stride, flags, start + column, inputs, columns)
            store_bytes(rest, largest, codes + token * columns + start + column, start + column < columns)
        tl.store(scales + token, tl.div_rn(largest, 127.0))
        if DENSE > 0:
            own = token + tl.zeros((1, 1), tl.int64)
            _copy_listed(x + own * x_stride, dense_inputs + own * DENSE, outliers, DTYPE, DENSE)


def find_few(x: Tensor, weight: EightBitWeight) -> Tensor:
    """Flags [shares of the tokens, columns]; to combine and list them is left to those who read them."""
    block = _block(x.shape[0], weight.columns)
    flags = torch.empty(triton.cdiv(x.shape[0], block.tokens), weight.columns, dtype=torch.uint8, device=x.device)
    _launch_find(x, weight, flags, None)
    return flags


def split_columns(
    x: Tensor, weight: EightBitWeight, codes: Tensor, scales: Tensor, *, copied: bool
) -> tuple[Tensor, DenseOutliers | None]:
    """The list of outliers and, where they are to be `copied`, their dense columns; the other columns are written to
    `codes` and `scales`."""
    tokens, columns = x.shape[0], weight.columns
    flags = torch.empty(columns, dtype=torch.uint8, device=x.device)
    outliers = torch.empty(1 + columns, dtype=torch.int32, device=x.device)
    _launch_find(x, weight, flags, outliers)
    dense = DenseOutliers(x.new_empty(tokens, DENSE), x.new_empty(weight.rows, DENSE)) if copied else None
    gathers = weight.rows // _GATHERED_ROWS if copied else 0
    width = min(triton.next_power_of_2(columns), _MOST_HELD)
    _split[(gathers + tokens,)](
        x,
        weight.values,
        flags,
        outliers,
        codes,
        scales,
        dense.inputs if dense else None,
        dense.weights if dense else None,
        gathers,
        x.shape[1],
        columns,
        x.stride(0),
        DTYPE=TRITON[x.dtype],
        WIDTH=width,
        DENSE=DENSE if copied else 0,
        ROWS=_GATHERED_ROWS,
        num_warps=warps_of_row(width, tokens),
        **chained(x.device),
    )
    return outliers, dense


def warps_of_row(width: int, tokens: int) -> int:
    """Of the program that holds a token's values, their number rounded up to a power of two. Few programs get many."""
    return max(4, min(32, width // 256) if tokens <= 8 else min(16, width // 1024))


def _launch_find(x: Tensor, weight: EightBitWeight, flags: Tensor, outliers: Tensor | None) -> None:
    """One program for every share of the tokens in a block's columns."""
    tokens, inputs = x.shape
    block = _block(tokens, weight.columns)
    share = triton.cdiv(triton.cdiv(tokens, block.shares), block.tokens) * block.tokens
    _find[(triton.cdiv(weight.columns, block.columns), triton.cdiv(tokens, share))](
        x,
        flags,
        outliers,
        weight.tickets,
        tokens,
        share,
        inputs,
        weight.columns,
        x.stride(0),
        weight.threshold,
        LIST=outliers is not None,
        COLUMNS=block.columns,
        TOKENS=block.tokens,
        LISTED=block.listed,
        num_warps=block.warps,
        **chained(x.device),
    )
