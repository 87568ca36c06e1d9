"""Attention of many new tokens per sequence over a paged cache: prefill, in chunks or after a reused prefix.

Layout   q, out [tokens, heads, head_dim], any strides but the last; the cache as in `cache.py`
Meaning  `reference.attention.attend`
Limits   query heads per KV head at most 64; sequences whose new tokens * group are at most `skip_rows` are left alone

One program serves BLOCK_M rows: BLOCK_M // GROUP neighbouring new tokens times the query heads of one KV head, which
all read the same keys. The last tokens of a sequence come first, since they look at the most keys; all tiles of a
sequence come together, since they share its keys in the second-level cache. Tiles of keys that every row sees skip
the mask; one loop takes both kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.attention.cache import CacheLayout
from quantkit.kernels.attention.integer_tiles import (
    VALUE_FACTOR,
    bytes_to_half,
    channels,
    high_to_half,
    join_halves,
    load_words,
    low_to_half,
    nibble_scores,
    part_of_word,
    scaled,
)
from quantkit.kernels.attention.tiles import (
    LOG2_E,
    LOWEST,
    cap_scores,
    find_sequence,
    for_products,
    load_pages,
    load_rows,
    multiply,
    multiply_add,
    row_offsets,
    settle,
    sink_scores,
)
from quantkit.kernels.card import NO_GPU, Card

_SEQUENCES_AT_ONCE = 256  # that a program looks through to find its own


@dataclass(frozen=True)
class PrefillConfig:
    """How the prefill kernel is compiled: rows and keys of a tile, warps, stages of the pipeline, registers."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread; 128 lets two programs of 8 warps share a multiprocessor


def prefill_config(padded_dim: int, card: Card = NO_GPU, *, bits: int = 0) -> PrefillConfig:
    """The default for a head dimension. Where a warp holds its operands itself, tiles are smaller, or they would spill.

    Up to 128, two programs share a multiprocessor: one multiplies while the other weighs. On an H200, dim 128, pages of
    16, 8x1024 / 1x8192 / 16x2048 tokens, in us: 183 / 1160 / 1309, against 222 / 1270 / 1490 for one program with three
    stages. A second loop without masks (192 / 1128 / 1300) or one program of 256 rows and 16 warps (193 / 1145 / 1288)
    lose on short prompts what they win on long ones; tiles of 32 keys (204 / 1279 / 1431 or more) and values one turn
    after their keys (211 / 1296 / 1520 or more) lose on all.

    `bits` are those of a cache of integers. With 8, a thread needs more than 128 registers; with 4 it holds halves of
    heads and what they are shifted by, and tiles are smaller still.
    """
    if bits == 4:
        from_shared = card is NO_GPU or card.multiplies_from_shared
        rows = 128 if from_shared and padded_dim < 256 else 64
        warps = 8 if from_shared or padded_dim == 256 else 4
        return PrefillConfig(block_m=rows, block_n=32, num_warps=warps, num_stages=2)
    if card is not NO_GPU and not card.multiplies_from_shared:
        return PrefillConfig(block_m=64, block_n=32 if padded_dim == 256 else 64, num_warps=4, num_stages=2)
    if padded_dim == 256:  # the sums alone take 128 registers
        return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)
    return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2, max_registers=None if bits else 128)


@triton.jit
def _row_places(
    first,
    query,
    new,
    head,
    per_token,
    per_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BITS: tl.constexpr = 0,
):
    """Offsets in q or out and mask [BLOCK_M, PADDED_DIM]: row r is query head r % GROUP of token query + r // GROUP."""
    row = tl.arange(0, BLOCK_M)
    columns, real = channels(HEAD_DIM, PADDED_DIM, BITS)
    mine = (row < BLOCK_M // GROUP * GROUP) & (query + row // GROUP < new)
    token = (first + query + row // GROUP).to(tl.int64)
    places = token * per_token + (head * GROUP + row % GROUP) * per_head
    return places[:, None] + columns[None, :], mine[:, None] & real[None, :]


@triton.jit
def _weigh(scores, tokens, position, top, total, clear, scale, soft_cap, window):
    """Weights of a tile's keys, the new `top` and `total`, and by what earlier weights shrink.

    `clear`: every row sees every key.
    """
    steep = scale * LOG2_E if soft_cap is None else LOG2_E  # capped scores are scaled already
    if soft_cap is not None:
        scores = cap_scores(scores, scale, soft_cap)
    if not clear:
        seen = tokens[None, :] <= position[:, None]
        if window is not None:
            seen = seen & (tokens[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, axis=1))
    shrink = tl.exp2((top - highest) * steep)
    weight = tl.exp2(scores * steep - (highest * steep)[:, None])
    return weight, highest, total * shrink + tl.sum(weight, axis=1), shrink


@triton.jit(do_not_specialize=["sequences", "table_stride", "window"])
def _prefill(
    q,
    out,
    cache_k,
    cache_v,
    page_table,
    contexts,
    starts,
    k_scale,
    v_scale,
    sinks,
    scale,
    soft_cap,
    window,
    table_stride,
    q_token,
    q_head,
    out_token,
    out_head,
    sequences,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SKIP_ROWS: tl.constexpr,
    SEQUENCES_AT_ONCE: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    ROW: tl.constexpr,
    PADDED_ROW: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
):
    QUERIES: tl.constexpr = BLOCK_M // GROUP  # new tokens per program
    head = tl.program_id(0) % KV_HEADS
    slot = tl.program_id(0) // KV_HEADS
    sequence = find_sequence(starts, slot, sequences, QUERIES, SEQUENCES_AT_ONCE)
    first = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - first
    context = tl.load(contexts + sequence)
    tiles = tl.cdiv(new, QUERIES)
    number = slot - (first // QUERIES + sequence)
    if (number >= tiles) | (new * GROUP <= SKIP_ROWS):
        return
    query = (tiles - 1 - number) * QUERIES  # the first of this program

    earliest = context - new + query  # positions of the first and the last query
    latest = tl.minimum(earliest + QUERIES, context) - 1
    oldest = 0  # the first token that any of the rows looks at
    clear_from = 0  # every row sees every key of the tiles that start here or later
    clear_to = (earliest + 1) // BLOCK_N * BLOCK_N  # and before here
    if window is not None:
        oldest = tl.maximum(earliest - window + 1, 0)
        clear_from = tl.maximum(latest - window + 1, 0)
    begin = oldest // BLOCK_N * BLOCK_N
    table = page_table + sequence.to(tl.int64) * table_stride

    if BITS == 4:  # a half of the heads at a time, as the cache has them
        places, held = _row_places(first, query, new, head, q_token, q_head, GROUP, ROW, BLOCK_M, PADDED_ROW)
        upper = for_products(tl.load(q + places + ROW, mask=held, other=0.0), cache_k)
        upper_sum = tl.sum(upper.to(tl.float32), axis=1)
    else:
        places, held = _row_places(first, query, new, head, q_token, q_head, GROUP, HEAD_DIM, BLOCK_M, PADDED_DIM)
    queries = for_products(tl.load(q + places, mask=held, other=0.0), cache_k)
    if BITS == 4:
        lower_sum = tl.sum(queries.to(tl.float32), axis=1)
    position = earliest + tl.arange(0, BLOCK_M) // GROUP
    if BITS == 0 and k_scale is not None:
        scale = scale * tl.load(k_scale + head)

    acc = tl.zeros([BLOCK_M, PADDED_ROW], tl.float32)
    if BITS == 4:
        upper_acc = tl.zeros([BLOCK_M, PADDED_ROW], tl.float32)
        lower_middle = tl.zeros([BLOCK_M], tl.float32)
        upper_middle = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:  # as if a token without a value had been seen
        top = sink_scores(sinks, head, scale * LOG2_E if soft_cap is None else LOG2_E, GROUP, BLOCK_M)
        total += 1.0
    pages = load_pages(table, begin, oldest, context, PAGE, BLOCK_N)
    for start in range(begin, latest + 1, BLOCK_N):
        following = load_pages(table, start + BLOCK_N, oldest, context, PAGE, BLOCK_N)
        tokens = start + tl.arange(0, BLOCK_N)
        inside = tokens < context
        if window is not None:
            inside = inside & (tokens >= oldest)
        offsets = row_offsets(pages, start, head, KV_HEADS, PAGE, ROW, HEAD_STRIDE, BLOCK_N, WIDE)
        keys = load_rows(cache_k, offsets, inside, ROW, PADDED_ROW)
        values = load_rows(cache_v, offsets, inside, ROW, PADDED_ROW)
        if BITS != 0:
            k_words = load_words(k_scale, pages, start, head, inside, KV_HEADS, PAGE, HEAD_WORDS, BLOCK_N, WIDE)
            v_words = load_words(v_scale, pages, start, head, inside, KV_HEADS, PAGE, HEAD_WORDS, BLOCK_N, WIDE)
        if BITS == 4:
            scores = nibble_scores(queries, upper, lower_sum, upper_sum, keys, k_words)
        elif BITS == 8:
            scores = multiply(queries, tl.trans(bytes_to_half(keys))) * k_words[None, :]
        else:
            scores = multiply(queries, tl.trans(keys.to(queries.dtype)))
        clear = (start >= clear_from) & (start < clear_to)
        weight, top, total, shrink = _weigh(scores, tokens, position, top, total, clear, scale, soft_cap, window)
        if BITS == 4:
            lower_middle = lower_middle * shrink + tl.sum(weight * part_of_word(v_words, 1)[None, :], axis=1)
            upper_middle = upper_middle * shrink + tl.sum(weight * part_of_word(v_words, 3)[None, :], axis=1)
            acc = multiply_add(scaled(weight, part_of_word(v_words, 0)), low_to_half(values), acc * shrink[:, None])
            upper_acc = multiply_add(
                scaled(weight, part_of_word(v_words, 2)), high_to_half(values), upper_acc * shrink[:, None]
            )
        elif BITS == 8:
            acc = multiply_add(scaled(weight, v_words), bytes_to_half(values), acc * shrink[:, None])
        else:
            acc = multiply_add(weight.to(queries.dtype), values.to(queries.dtype), acc * shrink[:, None])
        if PADDED_DIM <= 128:  # then the next scores take over the registers of the weights, and 128 suffice;
            acc = settle(acc)  # the wait is the other program's time, see prefill_config
        pages = following

    if BITS != 0:
        acc = acc * (1.0 / VALUE_FACTOR)
    if BITS == 4:
        lower = acc + lower_middle[:, None]
        upper_acc = upper_acc * (1.0 / VALUE_FACTOR) + upper_middle[:, None]
        acc = join_halves(lower, upper_acc, BLOCK_M, PADDED_DIM)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if BITS == 0 and v_scale is not None:
        acc = acc * tl.load(v_scale + head)
    # Read again, so that the places of the rows do not take 20 registers of every thread during the loop.
    first = tl.load(starts + sequence, volatile=True)
    new = tl.load(starts + sequence + 1, volatile=True) - first
    places, held = _row_places(first, query, new, head, out_token, out_head, GROUP, HEAD_DIM, BLOCK_M, PADDED_DIM, BITS)
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=held)


def prefill_constants(layout: CacheLayout, group: int, skip_rows: int, config: PrefillConfig) -> dict[str, int]:
    """What the kernel is compiled for."""
    return layout.constants() | {
        "GROUP": group,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SKIP_ROWS": skip_rows,
        "SEQUENCES_AT_ONCE": _SEQUENCES_AT_ONCE,
    }


def launch_prefill(
    tensors: tuple[Tensor | None, ...],
    scalars: tuple[Any, ...],
    layout: CacheLayout,
    group: int,
    skip_rows: int,
    tokens: int,
    sequences: int,
    config: PrefillConfig,
) -> None:
    """Launches what `attend` has checked; `tensors` and `scalars` are the kernel's arguments in their order."""
    slots = tokens // (config.block_m // group) + sequences  # see tiles.find_sequence
    _prefill[(slots * layout.kv_heads,)](
        *tensors,
        *scalars,
        sequences,
        **prefill_constants(layout, group, skip_rows, config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
    )
