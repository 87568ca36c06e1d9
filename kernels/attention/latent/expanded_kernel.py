"""Attention of prompts over keys and values that were made of latents, as the GPU runs it; `expanded.py` beside it has
layout, meaning and limits.

One program serves BLOCK_M neighbouring new tokens of one head. The last tokens of a sequence come first, since they
look at the most keys. Tiles that every row sees whole skip the mask; one loop takes both kinds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.attention.tiles import LOG2_E, LOWEST, find_sequence, load_rows, multiply, multiply_add


@triton.jit
def _places(first, rows, inside, per_token, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Offsets and mask [BLOCK_M, PADDED] of SIZE numbers of the new tokens at `rows`."""
    columns = tl.arange(0, PADDED)
    at = (first + rows).to(tl.int64) * per_token
    return at[:, None] + columns[None, :], inside[:, None] & (columns < SIZE)[None, :]


@triton.jit(do_not_specialize=["sequences", "heads"])
def attend_rows(
    q,
    turned,
    out,
    expanded,
    kept,
    first_queries,
    new_starts,
    first_rows,
    cache_scale,
    scale,
    q_token,
    q_head,
    turned_token,
    turned_head,
    out_token,
    out_head,
    expanded_token,
    sequences,
    heads,
    PLAIN: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_PLAIN: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEQUENCES_AT_ONCE: tl.constexpr,
):
    head = tl.program_id(0) % heads
    slot = tl.program_id(0) // heads
    sequence = find_sequence(new_starts, slot, sequences, BLOCK_M, SEQUENCES_AT_ONCE)
    before = tl.load(new_starts + sequence)
    new = tl.load(new_starts + sequence + 1) - before
    tiles = tl.cdiv(new, BLOCK_M)
    number = slot - (before // BLOCK_M + sequence)
    if number >= tiles:
        return
    first_row = tl.load(first_rows + sequence)
    context = tl.load(first_rows + sequence + 1) - first_row
    first = tl.load(first_queries + sequence)
    rows = (tiles - 1 - number) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside_rows = rows < new

    at, mask = _places(first, rows, inside_rows, q_token, PLAIN, PADDED_PLAIN)
    queries = tl.load(q + head * q_head + at, mask=mask, other=0.0)
    at, mask = _places(first, rows, inside_rows, turned_token, ROPE, PADDED_ROPE)
    turned_queries = tl.load(turned + head * turned_head + at, mask=mask, other=0.0)
    position = context - new + rows
    earliest = context - new + (tiles - 1 - number) * BLOCK_M  # of the rows
    latest = tl.minimum(earliest + BLOCK_M, context) - 1
    clear_to = (earliest + 1) // BLOCK_N * BLOCK_N  # every row sees every key before here
    if cache_scale is not None:
        scale = scale * tl.load(cache_scale)
    steep = scale * LOG2_E

    keys_at = expanded + first_row.to(tl.int64) * expanded_token + head * (PLAIN + VALUE)
    turned_at = kept + first_row.to(tl.int64) * (RANK + ROPE) + RANK
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_VALUE], tl.float32)
    for start in range(0, latest + 1, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        inside = tokens < context
        keys = load_rows(keys_at, tokens * expanded_token, inside, PLAIN, PADDED_PLAIN)
        turned_keys = load_rows(turned_at, tokens * (RANK + ROPE), inside, ROPE, PADDED_ROPE)
        values = load_rows(keys_at + PLAIN, tokens * expanded_token, inside, VALUE, PADDED_VALUE)
        scores = multiply_add(turned_queries, tl.trans(turned_keys), multiply(queries, tl.trans(keys)))
        if start >= clear_to:
            scores = tl.where(tokens[None, :] <= position[:, None], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2((top - highest) * steep)
        weight = tl.exp2(scores * steep - (highest * steep)[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        acc = multiply_add(weight.to(values.dtype), values, acc * shrink[:, None])
        top = highest

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if cache_scale is not None:
        acc = acc * tl.load(cache_scale)
    at, mask = _places(first, rows, inside_rows, out_token, VALUE, PADDED_VALUE)
    tl.store(out + head * out_head + at, acc.to(out.dtype.element_ty), mask=mask)
