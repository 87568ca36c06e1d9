"""LLM.int8 where outliers are everywhere: all inputs are multiplied in 16 bits, so that a product has a bound.

Gathered columns cost more each than columns in place, and the worst case is all of them. Where they are more than
`most_outliers`, nothing is rounded or gathered. The list of outliers, which the device has made, decides: the
host does not know it and launches the same kernels every time, as a CUDA graph must.

    up to 64 tokens    the 8-bit kernel itself multiplies once more, in 16 bits (`product_in_half`): the weight was read
                       as bytes a moment ago, so that both times together read what 16 bits would take
    more               the 8-bit kernel ends at once, and the launch after it multiplies; else the other way round
    more than 1,024    a launch between the two decodes the weight once, into memory of its own

Layout   as in `matmul.py`
Meaning  `reference.linear.linear` of inputs that are not rounded: more exact than LLM.int8 asks for
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.card import Card, card_of
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.linear.cost import Product, cheapest
from quantkit.kernels.linear.dispatch import bucket_of
from quantkit.kernels.linear.dot import dot
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.splits import add_in_order, cut, store_tile
from quantkit.kernels.linear.weight_only.assembly import TRITON

NAME = "16-bit matmul of bytes"
CHANGING = ("tokens", "per_split", "splits")  # from call to call: not worth a compilation each
DECODED_FROM = 1025  # tokens
FEWEST_OUTLIERS, SHARE_OF_OUTLIERS = 64, 16  # that the bound may be; of all columns, one in so many
_TOGETHER = 8  # tiles of outputs whose programs run at the same time, so that they read the same tokens
_DECODED_ROWS, _DECODED_COLUMNS = 16, 128  # of a weight, by one program


def most_outliers(inputs: int) -> int:
    """Columns with outliers, of so many in all, up to which the others are rounded."""
    return max(FEWEST_OUTLIERS, inputs // SHARE_OF_OUTLIERS)


@dataclass(frozen=True)
class HalfTile:
    """How the work is cut; `depth` is how many inputs one step takes."""

    outputs: int = 128
    tokens: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 4
    splits: int = 1


def tile_for(weight: EightBitWeight, tokens: int, card: Card) -> HalfTile:
    """Nobody has swept these."""
    if tokens >= DECODED_FROM:
        return HalfTile(tokens=256, stages=3) if card.multiplies_from_shared else HalfTile(depth=32)
    most = bucket_of(tokens)
    tiles = (HalfTile(tokens=64), HalfTile()) if card.multiplies_from_shared else (HalfTile(tokens=64, stages=3),)
    product = Product(weight.outputs, weight.columns, most, bytes_a_weight=1.0)
    chosen: HalfTile = cheapest(product, tiles, card)
    return chosen


@triton.jit
def product_in_half(
    x,
    weight_rows,
    token,
    here,
    first,
    last,
    inputs,
    x_stride,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Steps [first, last) of weight [OUTPUTS, inputs] times x as it is, float32. Bytes are exact in 16 bits."""
    acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for position in tl.range(first, last, num_stages=STAGES):
        column = position * DEPTH + tl.arange(0, DEPTH)
        weight = tl.load(weight_rows + column[None, :])
        mask = here[None, :] & (column < inputs)[:, None]
        value = tl.load(x + token.to(tl.int64)[None, :] * x_stride + column[:, None], mask=mask, other=0.0)
        acc += dot(weight.to(tl.float32).to(DTYPE), value, INTERPRET)
    return acc


@triton.jit
def _tile_of(OUTPUT_TILES: tl.constexpr):
    """(tile of tokens, tile of outputs) of a program: neighbours share tokens, some tiles of outputs at a time."""
    across, down = tl.num_programs(0), tl.num_programs(1)
    program = tl.program_id(1) * across + tl.program_id(0)
    begin = program // (OUTPUT_TILES * across) * OUTPUT_TILES
    together = tl.minimum(down - begin, OUTPUT_TILES)
    inside = program - begin * across
    return inside // together, begin + inside % together


@triton.jit(do_not_specialize=CHANGING)
def _in_half(
    x,
    outliers,
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
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_last(CHAINED)
    if tl.load(outliers) <= most:
        return
    token_tile, output_tile = _tile_of(TOGETHER)
    row = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    here = token < tokens
    first = split * per_split
    last_step = tl.minimum(first + per_split, columns // DEPTH)
    weight_rows = weights + row.to(tl.int64)[:, None] * columns
    result = product_in_half(x, weight_rows, token, here, first, last_step, inputs, x_stride, OUTPUTS, TOKENS, DEPTH,
                             STAGES, DTYPE, INTERPRET)  # fmt: skip
    result *= tl.load(weight_scales + row)[:, None]
    result, last = add_in_order(result, partial, tickets, split, splits, OUTPUTS, TOKENS)
    if last:
        store_tile(result, bias, y, row, token, tokens, outputs, y_stride, HAS_BIAS, DTYPE, INTERPRET)


@triton.jit
def _decode(
    weights,
    outliers,
    decoded,
    columns,
    most,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_last(CHAINED)
    if tl.load(outliers) <= most:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for start in range(0, columns, COLUMNS):
        place = row.to(tl.int64)[:, None] * columns + start + tl.arange(0, COLUMNS)[None, :]
        tl.store(decoded + place, tl.load(weights + place).to(tl.float32).to(DTYPE))


def launch_in_half(x: Tensor, outliers: Tensor, weight: EightBitWeight, bias: Tensor | None, y: Tensor) -> None:
    """Writes y where more columns than `most_outliers` are listed; else nothing."""
    tokens, columns = x.shape[0], weight.columns
    tile, most = tile_for(weight, tokens, card_of(x.device)), most_outliers(weight.inputs)
    values = weight.values
    if tokens >= DECODED_FROM:
        values = torch.empty(values.shape, dtype=x.dtype, device=x.device)
        _decode[(weight.rows // _DECODED_ROWS,)](
            weight.values,
            outliers,
            values,
            columns,
            most,
            DTYPE=TRITON[x.dtype],
            ROWS=_DECODED_ROWS,
            COLUMNS=_DECODED_COLUMNS,
            num_warps=4,
            **chained(x.device),
        )
    shared = cut(NAME, tokens, weight.outputs, weight.rows, columns // tile.depth, tile, x.device)
    _in_half[shared.grid](
        x,
        outliers,
        values,
        weight.scales,
        bias,
        y,
        shared.partial,
        weight.tickets,
        tokens,
        weight.outputs,
        weight.inputs,
        columns,
        most,
        shared.per_split,
        shared.grid[2],
        x.stride(0),
        y.stride(0),
        HAS_BIAS=bias is not None,
        DTYPE=TRITON[x.dtype],
        INTERPRET=triton.knobs.runtime.interpret,
        OUTPUTS=tile.outputs,
        TOKENS=tile.tokens,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        TOGETHER=_TOGETHER,
        **chained(x.device),
        num_warps=tile.warps,
    )
