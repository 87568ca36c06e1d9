"""Attention over a paged cache of latents, as the GPU runs it; `attend.py` beside it has layout, meaning and limits.

One program serves one (sequence, block of rows, split). Rows are the new tokens of a sequence times the heads: all of
them read the same latents, so BLOCK_M of them share every load, and a latent that was loaded as a key is the value.
A block sees no further than its last token. Where all sequences have equally many new tokens (EVEN), a program knows
its own; else it looks for it, so that the grid grows with the tokens alone (`find_sequence`).

Where contexts are divided, a second kernel adds the parts of a row up in their order: a row has 512 numbers, and one
program that added all rows of a block up would take longer than a launch. A part without tokens has a sum of weights
of 0 and is passed by.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.attention.decode_plan import MOST_NODES
from quantkit.kernels.attention.tiles import (
    LOG2_E,
    LOWEST,
    find_sequence,
    for_products,
    load_pages,
    load_rows,
    multiply,
    multiply_add,
    row_offsets,
)
from quantkit.kernels.chain import wait_for_last

OLD_BIT = tl.constexpr(MOST_NODES)  # of a row's ancestors: all old tokens


@triton.jit
def _queries(q, places, inside, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """SIZE numbers of every query: [BLOCK_M, PADDED]."""
    columns = tl.arange(0, PADDED)
    mask = inside[:, None] & (columns < SIZE)[None, :]
    return tl.load(q + places[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["table_stride", "splits", "sequences", "blocks"])
def attend_part(
    q,
    turned,
    out,
    cache,
    page_table,
    contexts,
    starts,
    cache_scale,
    ancestors,
    partial,
    stats,
    scale,
    table_stride,
    q_token,
    q_head,
    turned_token,
    turned_head,
    splits,
    sequences,
    blocks,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    DIVIDED: tl.constexpr,
    SEQUENCES_AT_ONCE: tl.constexpr,
    WIDE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_last(CHAINED)
    split = tl.program_id(0) % splits
    slot = tl.program_id(0) // splits
    if EVEN:
        sequence = slot // blocks
        first = tl.load(starts + sequence)
        block = slot % blocks
    else:
        sequence = find_sequence(starts, slot, sequences, BLOCK_M, SEQUENCES_AT_ONCE, HEADS)
        first = tl.load(starts + sequence)
        block = slot - (first * HEADS // BLOCK_M + sequence)
    new = tl.load(starts + sequence + 1) - first
    context = tl.load(contexts + sequence)
    rows = new * HEADS
    if block * BLOCK_M >= rows:
        return
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside_rows = row < rows
    token = (first + row // HEADS).to(tl.int64)
    place = (token * HEADS + row % HEADS) * splits + split
    columns = tl.arange(0, PADDED_RANK)
    mask = inside_rows[:, None] & (columns < RANK)[None, :]
    last = tl.minimum((block + 1) * BLOCK_M, rows) - 1
    reach = context - new + last // HEADS + 1  # no row of this block sees a token from here on
    share = tl.cdiv(tl.cdiv(reach, BLOCK_N), splits) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, reach)
    if begin >= end:
        if DIVIDED:
            tl.store(stats + place * 2 + 1, tl.zeros([BLOCK_M], tl.float32), mask=inside_rows)
        else:  # padding in front of a graph's sequence sees nothing, and what others read of it must be numbers
            nothing = tl.zeros([BLOCK_M, PADDED_RANK], out.dtype.element_ty)
            tl.store(out + place[:, None] * RANK + columns[None, :], nothing, mask=mask)
        return

    at = token * q_token + (row % HEADS) * q_head
    latent_queries = for_products(_queries(q, at, inside_rows, RANK, PADDED_RANK), cache)
    at = token * turned_token + (row % HEADS) * turned_head
    turned_queries = for_products(_queries(turned, at, inside_rows, ROPE, PADDED_ROPE), cache)
    position = context - new + row // HEADS
    if ancestors is not None:
        bits = tl.load(ancestors + first + row // HEADS, mask=inside_rows, other=0)
        bits = bits | (tl.full([BLOCK_M], 1, tl.int64) << OLD_BIT)
    if cache_scale is not None:
        scale = scale * tl.load(cache_scale)
    steep = scale * LOG2_E

    table = page_table + sequence.to(tl.int64) * table_stride
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_RANK], tl.float32)
    pages = load_pages(table, begin, 0, end, PAGE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        following = load_pages(table, start + BLOCK_N, 0, end, PAGE, BLOCK_N)
        tokens = start + tl.arange(0, BLOCK_N)
        inside = tokens < end
        offsets = row_offsets(pages, start, 0, 1, PAGE, RANK + ROPE, PAGE * (RANK + ROPE), BLOCK_N, WIDE)
        latents = load_rows(cache, offsets, inside, RANK, PADDED_RANK).to(latent_queries.dtype)
        keys = load_rows(cache + RANK, offsets, inside, ROPE, PADDED_ROPE).to(latent_queries.dtype)
        scores = multiply_add(turned_queries, tl.trans(keys), multiply(latent_queries, tl.trans(latents)))
        if ancestors is not None:
            node = tokens - (context - new)
            asked = tl.full([BLOCK_N], 1, tl.int64) << tl.where((node < 0) | (node > OLD_BIT), OLD_BIT, node)
            seen = (bits[:, None] & asked[None, :]) != 0
        else:
            seen = tokens[None, :] <= position[:, None]
        scores = tl.where(seen & inside[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2((top - highest) * steep)
        weight = tl.exp2(scores * steep - (highest * steep)[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        acc = multiply_add(weight.to(latents.dtype), latents, acc * shrink[:, None])
        top = highest
        pages = following

    if cache_scale is not None:
        acc = acc * tl.load(cache_scale)
    if DIVIDED:
        tl.store(partial + place[:, None] * RANK + columns[None, :], acc, mask=mask)
        tl.store(stats + place * 2, top * steep, mask=inside_rows)
        tl.store(stats + place * 2 + 1, total, mask=inside_rows)
    else:
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out + place[:, None] * RANK + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits", "sequences"])
def add_parts(
    out,
    partial,
    stats,
    starts,
    splits,
    sequences,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """COLUMNS numbers of one row of `out` from its parts, CHUNK of them at a time in their order."""
    wait_for_last(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(starts + sequences) * HEADS:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top = LOWEST
    total = 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    for base in range(0, splits, CHUNK):
        split = base + tl.arange(0, CHUNK)
        place = row * splits + split
        totals = tl.load(stats + place * 2 + 1, mask=split < splits, other=0.0)
        written = totals > 0.0
        tops = tl.load(stats + place * 2, mask=written, other=LOWEST)
        mask = written[:, None] & (columns < RANK)[None, :]
        sums = tl.load(partial + place[:, None] * RANK + columns[None, :], mask=mask, other=0.0)
        highest = tl.maximum(top, tl.max(tops, axis=0))
        shrink = tl.exp2(top - highest)
        share = tl.where(written, tl.exp2(tops - highest), 0.0)
        total = total * shrink + tl.sum(totals * share, axis=0)
        acc = acc * shrink + tl.sum(sums * share[:, None], axis=0)
        top = highest
    result = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * RANK + columns, result.to(out.dtype.element_ty), mask=columns < RANK)
