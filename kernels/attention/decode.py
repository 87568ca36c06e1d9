"""Attention of a few new tokens per sequence over a paged cache: decoding, and verification in speculative decoding.

Layout   q, out [tokens, heads, head_dim], any strides but the last; the cache as in `cache.py`
Meaning  `reference.attention.attend`
Limits   new tokens of a sequence * query heads per KV head at most 64 (BLOCK_M); longer ones are left alone

One program serves one (sequence, KV head, split): the new tokens times the query heads of that KV head are the rows of
its matrices, so a key is read once. `meeting.py` says how splits share a context.

With `ancestors`, new tokens are nodes of a tree, and a row's bits say which of them it sees. Bit 62 belongs to no node:
it stands for all old tokens, so that one test per score is enough.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.attention.cache import CacheLayout
from quantkit.kernels.attention.decode_plan import MOST_NODES, DecodeConfig, Scratch
from quantkit.kernels.attention.integer_tiles import (
    VALUE_FACTOR,
    bytes_to_half,
    high_to_half,
    join_halves,
    load_half,
    load_words,
    low_to_half,
    nibble_scores,
    part_of_word,
    scaled,
)
from quantkit.kernels.attention.meeting import constants_of, meet, part_of_context, place_of_program
from quantkit.kernels.attention.tiles import (
    LOG2_E,
    LOWEST,
    cap_scores,
    for_products,
    load_pages,
    load_rows,
    multiply,
    multiply_add,
    row_offsets,
    sink_scores,
)
from quantkit.kernels.chain import chained, wait_for_last

OLD_BIT = tl.constexpr(MOST_NODES)  # of a row's ancestors: all old tokens


@triton.jit(do_not_specialize=["splits", "table_stride", "window"])
def _decode(
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
    ancestors,
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
    BLOCK_M: tl.constexpr,
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
    rows = new * GROUP
    if (rows > MAX_ROWS) | (rows <= 0):
        return
    oldest = 0  # the first token that any of the rows looks at
    if window is not None:
        oldest = tl.maximum(context - new - window + 1, 0)
    begin, end, used = part_of_context(context, oldest, split, splits, BLOCK_N)
    if split >= used:
        return

    row = tl.arange(0, BLOCK_M)
    places = q + (first + row // GROUP).to(tl.int64) * q_token + (head * GROUP + row % GROUP) * q_head
    if BITS == 4:  # a half of the heads at a time, as the cache has them
        queries = for_products(load_half(places, row < rows, ROW, PADDED_ROW), cache_k)
        upper = for_products(load_half(places + ROW, row < rows, ROW, PADDED_ROW), cache_k)
        lower_sum, upper_sum = tl.sum(queries.to(tl.float32), axis=1), tl.sum(upper.to(tl.float32), axis=1)
    else:
        queries = for_products(load_half(places, row < rows, HEAD_DIM, PADDED_DIM), cache_k)
    position = context - new + row // GROUP
    if ancestors is not None:
        bits = tl.load(ancestors + first + row // GROUP, mask=row < rows, other=0)
        bits = bits | (tl.full([BLOCK_M], 1, tl.int64) << OLD_BIT)
    if BITS == 0 and k_scale is not None:
        scale = scale * tl.load(k_scale + head)
    steep = scale * LOG2_E if soft_cap is None else LOG2_E  # capped scores are scaled already

    table = page_table + sequence.to(tl.int64) * table_stride
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # summed over the columns once, after the loop
    if sinks is not None:  # a weight of 1 in the first split, as if that had seen a token without a value
        top = tl.where(split == 0, sink_scores(sinks, head, steep, GROUP, BLOCK_M), top)
        weights += tl.where((tl.arange(0, BLOCK_N) == 0) & (split == 0), 1.0, 0.0)[None, :]
    acc = tl.zeros([BLOCK_M, PADDED_ROW], tl.float32)
    if BITS == 4:
        upper_acc = tl.zeros([BLOCK_M, PADDED_ROW], tl.float32)
        lower_middles = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # summed after the loop, too
        upper_middles = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    pages = load_pages(table, begin, oldest, end, PAGE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        following = load_pages(table, start + BLOCK_N, oldest, end, PAGE, BLOCK_N)
        tokens = start + tl.arange(0, BLOCK_N)
        inside = tokens < end
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
        if soft_cap is not None:
            scores = cap_scores(scores, scale, soft_cap)
        if ancestors is not None:
            node = tokens - (context - new)
            asked = tl.full([BLOCK_N], 1, tl.int64) << tl.where((node < 0) | (node > OLD_BIT), OLD_BIT, node)
            seen = (bits[:, None] & asked[None, :]) != 0  # `inside` ends with the context
        else:
            seen = tokens[None, :] <= position[:, None]
        if window is not None:
            seen = seen & (tokens[None, :] > position[:, None] - window)
        scores = tl.where(seen & inside[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2((top - highest) * steep)
        weight = tl.exp2(scores * steep - (highest * steep)[:, None])
        weights = weights * shrink[:, None] + weight
        if BITS == 4:
            lower_middles = lower_middles * shrink[:, None] + weight * part_of_word(v_words, 1)[None, :]
            upper_middles = upper_middles * shrink[:, None] + weight * part_of_word(v_words, 3)[None, :]
            acc = multiply_add(scaled(weight, part_of_word(v_words, 0)), low_to_half(values), acc * shrink[:, None])
            upper_acc = multiply_add(
                scaled(weight, part_of_word(v_words, 2)), high_to_half(values), upper_acc * shrink[:, None]
            )
        elif BITS == 8:
            acc = multiply_add(scaled(weight, v_words), bytes_to_half(values), acc * shrink[:, None])
        else:
            acc = multiply_add(weight.to(queries.dtype), values.to(queries.dtype), acc * shrink[:, None])
        top = highest
        pages = following

    total = tl.sum(weights, axis=1)
    if BITS != 0:
        acc = acc * (1.0 / VALUE_FACTOR)
    if BITS == 4:
        lower = acc + tl.sum(lower_middles, axis=1)[:, None]
        upper_acc = upper_acc * (1.0 / VALUE_FACTOR) + tl.sum(upper_middles, axis=1)[:, None]
        acc = join_halves(lower, upper_acc, BLOCK_M, PADDED_DIM)
    meet(acc, top * steep, total, out, v_scale, partial, stats, tickets, first, pair, head, split, splits, used, rows,
         out_token, out_head, GROUP, HEAD_DIM, PADDED_DIM, BITS, MAX_ROWS, ROWS, CHUNK)  # fmt: skip


def launch_decode(
    tensors: tuple[Tensor | None, ...],
    scalars: tuple[Any, ...],
    scratch: Scratch,
    layout: CacheLayout,
    group: int,
    max_rows: int,
    pairs: int,
    splits: int,
    config: DecodeConfig,
) -> None:
    """Launches what `attend` has checked; `tensors` and `scalars` are the kernel's arguments in their order."""
    _decode[(pairs * splits,)](
        *tensors,
        scratch.partial,
        scratch.stats,
        scratch.tickets,
        *scalars,
        splits,
        **constants_of(layout, group, max_rows, config),
        BLOCK_M=max(16, triton.next_power_of_2(max_rows)),  # the smallest that a matrix instruction takes
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **chained(scratch.partial.device),
    )
