"""How programs share a context: which tiles each of them has, and where their results meet.

Each sequence divides its own context over the splits; a program without a share exits at once. Every split leaves its
weighted sum, its largest score and its sum of weights in a scratch buffer and takes a ticket; who takes the last one
adds the splits up in their order, so results do not depend on who that was.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.attention.cache import CacheLayout
from quantkit.kernels.attention.decode_plan import DecodeConfig
from quantkit.kernels.attention.integer_tiles import channels
from quantkit.kernels.attention.tiles import LOWEST

TILES_ALONE = tl.constexpr(3)  # that are not divided: meeting takes longer (H200, 160 tokens: 5.3 us, divided 6.7)


@triton.jit
def place_of_program(starts, contexts, splits, KV_HEADS: tl.constexpr):
    """(split, pair, sequence, head, first, new, context): which split this program is of which pair of a sequence and a
    KV head; the first of its new tokens, how many there are, and all of its tokens."""
    split = tl.program_id(0) % splits
    pair = tl.program_id(0) // splits
    sequence = pair // KV_HEADS
    first = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - first
    return split, pair, sequence, pair % KV_HEADS, first, new, tl.load(contexts + sequence)


@triton.jit
def part_of_context(context, oldest, split, splits, BLOCK_N: tl.constexpr):
    """(begin, end, used): the tokens of this split, in whole tiles, and how many splits have any. `oldest` is the first
    token that anybody looks at."""
    bottom = oldest // BLOCK_N
    tiles = tl.cdiv(context, BLOCK_N) - bottom
    share = tl.where(tiles <= TILES_ALONE, tiles, tl.cdiv(tiles, splits))
    begin = (bottom + split * share) * BLOCK_N
    return begin, tl.minimum(begin + share * BLOCK_N, context), tl.cdiv(tiles, share)


@triton.jit
def _combine(
    partial,
    stats,
    splits,
    rows,
    ROWS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The output [ROWS, PADDED_DIM] of all splits of one sequence and head, CHUNK splits at a time in their order."""
    row = tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED_DIM)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for base in range(0, splits, CHUNK):
        split = base + tl.arange(0, CHUNK)
        inside = (split < splits)[:, None] & (row < rows)[None, :]  # [CHUNK, ROWS]
        place = split[:, None] * rows + row[None, :]
        # .cg: past the first-level cache, which other multiprocessors do not write to
        sums = tl.load(
            partial + place[:, :, None] * PADDED_DIM + columns[None, None, :],
            mask=inside[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        tops = tl.load(stats + place * 2, mask=inside, other=LOWEST, cache_modifier=".cg")
        weights = tl.load(stats + place * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(top, tl.max(tops, axis=0))
        shrink = tl.exp2(top - highest)
        share = tl.exp2(tops - highest[None, :])
        total = total * shrink + tl.sum(weights * share, axis=0)
        acc = acc * shrink[:, None] + tl.sum(sums * share[:, :, None], axis=0)
        top = highest
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def _store_rows(
    out,
    values,
    first,
    head,
    out_token,
    out_head,
    rows,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    v_scale,
):
    """Row r of `values` is query head r % GROUP of new token r // GROUP."""
    row = tl.arange(0, values.shape[0])
    columns, real = channels(HEAD_DIM, values.shape[1], BITS)
    if BITS == 0 and v_scale is not None:
        values = values * tl.load(v_scale + head)
    place = (first + row // GROUP).to(tl.int64) * out_token + (head * GROUP + row % GROUP) * out_head
    inside = (row < rows)[:, None] & real[None, :]
    tl.store(out + place[:, None] + columns[None, :], values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def meet(
    acc,
    top,
    total,
    out,
    v_scale,
    partial,
    stats,
    tickets,
    first,
    pair,
    head,
    split,
    splits,
    used,
    rows,
    out_token,
    out_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BITS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes the output of a pair of a sequence and a KV head, or this split's part of it: the weighted sum of values,
    the largest score in powers of two, the sum of weights."""
    row = tl.arange(0, acc.shape[0])
    columns = tl.arange(0, PADDED_DIM)
    if used == 1:
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        _store_rows(out, acc, first, head, out_token, out_head, rows, GROUP, HEAD_DIM, BITS, v_scale)
    else:
        base = (pair * splits).to(tl.int64) * MAX_ROWS  # of this pair; its splits lie `rows` rows apart
        place = base + split * rows + row
        tl.store(partial + place[:, None] * PADDED_DIM + columns[None, :], acc, mask=(row < rows)[:, None])
        tl.store(stats + place * 2, top, mask=row < rows)
        tl.store(stats + place * 2 + 1, total, mask=row < rows)
        tl.debug_barrier()  # one thread takes the ticket for what all threads stored
        if tl.atomic_add(tickets + pair, 1, sem="acq_rel") == used - 1:
            tl.store(tickets + pair, 0)
            result = _combine(partial + base * PADDED_DIM, stats + base * 2, used, rows, ROWS, PADDED_DIM, CHUNK)
            _store_rows(out, result, first, head, out_token, out_head, rows, GROUP, HEAD_DIM, BITS, v_scale)


def constants_of(layout: CacheLayout, group: int, max_rows: int, config: DecodeConfig) -> dict[str, int]:
    """What a kernel whose programs meet here is compiled for."""
    rows = triton.next_power_of_2(max_rows)
    return layout.constants() | {
        "GROUP": group,
        "BLOCK_N": config.block_n,
        "MAX_ROWS": max_rows,
        "ROWS": rows,
        "CHUNK": max(1, min(64, config.num_warps * 1024 // (rows * layout.padded_dim))),  # 32 registers a thread
    }
