"""Decoding over a cache of integers with tokens as the rows of matrices, and products of scores on the integer units.

Layout   as `decode.py`; caches of int8 and int4 only
Meaning  `reference.attention.attend`, with queries in fixed point of 16 bits
Limits   one new token of a sequence, up to 8 query heads for a KV head, 16 words of a row and more

In `decode.py` query heads are rows, of which the smallest product has 16, and every code becomes a float16 of its own.
Here query heads are the columns, of which a product may have 8. Keys are operands as they lie in memory: a query is two
digits (`digits.py`), and the two sums are exact. Values take three instructions for two codes (`integer_words.py`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.attention.cache import CacheLayout
from quantkit.kernels.attention.decode_plan import IntegerDecodeConfig, Scratch
from quantkit.kernels.attention.integer_tiles import VALUE_FACTOR, join_halves, load_words, part_of_word
from quantkit.kernels.attention.integer_words import (
    byte_operands,
    columns_of_words,
    high_nibbles,
    low_nibbles,
    nibble_operands,
)
from quantkit.kernels.attention.meeting import constants_of, meet, part_of_context, place_of_program
from quantkit.kernels.attention.tiles import (
    INTERPRETED,
    LOG2_E,
    LOWEST,
    cap_scores,
    load_pages,
    multiply_add,
    row_offsets,
    sink_scores,
)
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.digits import times_digits, two_digits

COLUMNS = tl.constexpr(8)  # of matrices: the fewest that a product has
_FEWEST_WORDS = 16  # of a row of the cache, which are rows of a product


def takes(layout: CacheLayout, rows: int) -> bool:
    """Whether sequences of up to `rows` rows over such a cache can go this way."""
    return layout.codes is not None and rows <= COLUMNS.value and layout.padded_row >= 4 * _FEWEST_WORDS


@triton.jit
def _load_queries(places, mine, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """As `two_digits` of each column, from the addresses of query heads; 0 past WIDTH."""
    element = tl.arange(0, PADDED)
    mask = mine[None, :] & (element < WIDTH)[:, None]
    return two_digits(tl.load(places[None, :] + element[:, None], mask=mask, other=0.0).to(tl.float32), 0)


@triton.jit
def _nibble_scores(codes, high, low, step, total, scale, middle):
    """Of a half of each key, whose value is (code - 8) * scale + middle."""
    whole = times_digits(codes, high, low, INTERPRETED) - 8 * total[None, :]
    scores = whole.to(tl.float32) * scale[:, None] + total.to(tl.float32)[None, :] * middle[:, None]
    return scores * step[None, :]


@triton.jit
def _with_tile(sums, shrink, first_byte, second_byte, third_byte, fourth_byte, weight):
    """The sums, shrunk, and those of a tile: [words, columns] of every byte of a word."""
    first, second, third, fourth = sums
    row = shrink[None, :]
    first = multiply_add(first_byte, weight, first * row)
    second = multiply_add(second_byte, weight, second * row)
    third = multiply_add(third_byte, weight, third * row)
    fourth = multiply_add(fourth_byte, weight, fourth * row)
    return first, second, third, fourth


@triton.jit
def _empty_sums(WORDS: tl.constexpr):
    zero = tl.zeros([WORDS, COLUMNS], tl.float32)
    return zero, zero, zero, zero


@triton.jit
def _finished(sums, WORDS: tl.constexpr):
    """[COLUMNS, 4 * WORDS] of values."""
    first, second, third, fourth = sums
    return columns_of_words(first, second, third, fourth, WORDS, COLUMNS) * (1.0 / VALUE_FACTOR)


@triton.jit
def _in_half(weight, scale):
    """Weights [tokens, columns] as their values' codes take them."""
    return (weight * (scale * VALUE_FACTOR)[:, None]).to(tl.float16)


@triton.jit(do_not_specialize=["splits", "table_stride", "window"])
def _decode_integers(
    q,
    out,
    cache_k,
    cache_v,
    page_table,
    contexts,
    starts,
    key_words,
    value_words,
    sinks,
    partial,
    stats,
    tickets,
    scale,
    soft_cap,
    window,
    table_stride,
    q_token,
    q_head,
    out_token,
    out_head,
    splits,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    ROW: tl.constexpr,
    PADDED_ROW: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_last(CHAINED)
    split, pair, sequence, head, first, new, context = place_of_program(starts, contexts, splits, KV_HEADS)
    if new != 1:
        return
    oldest = 0  # the first token that the new one looks at
    if window is not None:
        oldest = tl.maximum(context - window, 0)
    begin, end, used = part_of_context(context, oldest, split, splits, BLOCK_N)
    if split >= used:
        return

    WORDS: tl.constexpr = PADDED_ROW // 4
    column = tl.arange(0, COLUMNS)
    byte = tl.arange(0, PADDED_ROW)
    word = tl.arange(0, WORDS)
    mine = column < GROUP
    places = q + first.to(tl.int64) * q_token + (head * GROUP + column) * q_head
    if BITS == 4:  # a half of the heads at a time, as the cache has them
        high, low, step, whole = _load_queries(places, mine, ROW, PADDED_ROW)
        upper_high, upper_low, upper_step, upper_whole = _load_queries(places + ROW, mine, ROW, PADDED_ROW)
    else:
        high, low, step, whole = _load_queries(places, mine, HEAD_DIM, PADDED_DIM)
    steep = scale * LOG2_E if soft_cap is None else LOG2_E  # capped scores are scaled already

    table = page_table + sequence.to(tl.int64) * table_stride
    values_of_cache = cache_v.to(tl.pointer_type(tl.int32))
    top = tl.full([COLUMNS], LOWEST, tl.float32)
    weights = tl.zeros([BLOCK_N, COLUMNS], tl.float32)  # summed over the tokens once, after the loop
    if sinks is not None:  # a weight of 1 in the first split, as if that had seen a token without a value
        top = tl.where(split == 0, sink_scores(sinks, head, steep, GROUP, COLUMNS), top)
        weights += tl.where((tl.arange(0, BLOCK_N) == 0) & (split == 0), 1.0, 0.0)[:, None]
    sums = _empty_sums(WORDS)
    if BITS == 4:
        upper_sums = _empty_sums(WORDS)
        middles = tl.zeros([BLOCK_N, COLUMNS], tl.float32)  # summed after the loop, too
        upper_middles = tl.zeros([BLOCK_N, COLUMNS], tl.float32)
    pages = load_pages(table, begin, oldest, end, PAGE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        following = load_pages(table, start + BLOCK_N, oldest, end, PAGE, BLOCK_N)
        tokens = start + tl.arange(0, BLOCK_N)
        inside = tokens < end
        if window is not None:
            inside = inside & (tokens >= oldest)
        # Codes are finite and lie in some page in any case; that nobody sees them is said by their words, 0.
        offsets = row_offsets(pages, start, head, KV_HEADS, PAGE, ROW, HEAD_STRIDE, BLOCK_N, WIDE)
        value_offsets = row_offsets(pages, start, head, KV_HEADS, PAGE, ROW // 4, HEAD_STRIDE // 4, BLOCK_N, WIDE)
        if ROW == PADDED_ROW:
            keys = tl.load(cache_k + offsets[:, None] + byte[None, :])
            values = tl.load(values_of_cache + value_offsets[None, :] + word[:, None])
        else:
            keys = tl.load(cache_k + offsets[:, None] + byte[None, :], mask=(byte < ROW)[None, :], other=0)
            place = values_of_cache + value_offsets[None, :] + word[:, None]
            values = tl.load(place, mask=(word < ROW // 4)[:, None], other=0)
        k_words = load_words(key_words, pages, start, head, inside, KV_HEADS, PAGE, HEAD_WORDS, BLOCK_N, WIDE)
        v_words = load_words(value_words, pages, start, head, inside, KV_HEADS, PAGE, HEAD_WORDS, BLOCK_N, WIDE)
        if BITS == 4:
            k_low, k_high = low_nibbles(keys), high_nibbles(keys)
            scores = _nibble_scores(k_low, high, low, step, whole, part_of_word(k_words, 0), part_of_word(k_words, 1))
            scores += _nibble_scores(k_high, upper_high, upper_low, upper_step, upper_whole,
                                     part_of_word(k_words, 2), part_of_word(k_words, 3))  # fmt: skip
        else:
            scores = times_digits(keys, high, low, INTERPRETED).to(tl.float32) * k_words[:, None] * step[None, :]
        if soft_cap is not None:
            scores = cap_scores(scores, scale, soft_cap)
        scores = tl.where(inside[:, None], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=0))
        shrink = tl.exp2((top - highest) * steep)
        weight = tl.exp2(scores * steep - (highest * steep)[None, :])
        weights = weights * shrink[None, :] + weight
        if BITS == 4:
            middles = middles * shrink[None, :] + weight * part_of_word(v_words, 1)[:, None]
            upper_middles = upper_middles * shrink[None, :] + weight * part_of_word(v_words, 3)[:, None]
            b0, b1, b2, b3, b4, b5, b6, b7 = nibble_operands(values)
            sums = _with_tile(sums, shrink, b0, b1, b2, b3, _in_half(weight, part_of_word(v_words, 0)))
            upper_sums = _with_tile(upper_sums, shrink, b4, b5, b6, b7, _in_half(weight, part_of_word(v_words, 2)))
        else:
            b0, b1, b2, b3 = byte_operands(values)
            sums = _with_tile(sums, shrink, b0, b1, b2, b3, _in_half(weight, v_words))
        top = highest
        pages = following

    if BITS == 4:
        lower = _finished(sums, WORDS) + tl.sum(middles, axis=0)[:, None]
        upper = _finished(upper_sums, WORDS) + tl.sum(upper_middles, axis=0)[:, None]
        acc = join_halves(lower, upper, COLUMNS, PADDED_DIM)
    else:
        acc = _finished(sums, WORDS)
    total = tl.sum(weights, axis=0)
    meet(acc, top * steep, total, out, None, partial, stats, tickets, first, pair, head, split, splits, used, GROUP,
         out_token, out_head, GROUP, HEAD_DIM, PADDED_DIM, BITS, MAX_ROWS, ROWS, CHUNK)  # fmt: skip


def launch_decode_integers(
    tensors: tuple[Tensor | None, ...],
    scalars: tuple[Any, ...],
    scratch: Scratch,
    layout: CacheLayout,
    group: int,
    max_rows: int,
    pairs: int,
    splits: int,
    config: IntegerDecodeConfig,
) -> None:
    """Launches what `attend` has checked; `tensors` and `scalars` are the kernel's arguments in their order."""
    _decode_integers[(pairs * splits,)](
        *tensors,
        scratch.partial,
        scratch.stats,
        scratch.tickets,
        *scalars,
        splits,
        **constants_of(layout, group, max_rows, config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **chained(scratch.partial.device),
    )
