"""What the decode and the prefill kernel share: which page a key lies in, where its row starts, what a score becomes.

A tile is BLOCK_N consecutive tokens of one sequence, starting at a multiple of BLOCK_N. Page numbers are fetched one
tile ahead of the rows they lead to: a row's load would otherwise wait for two trips to memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # instead of -inf, so that the difference of two of them is a number


@triton.jit
def load_pages(table, start, first, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page numbers of the tile at `start`: [BLOCK_N], or one where a page holds the tile; 0 outside first..end - 1."""
    pages = table + start // PAGE
    if PAGE >= BLOCK_N:
        return tl.load(pages, mask=(start < end) & (start + BLOCK_N > first), other=0)
    else:
        steps = tl.arange(0, BLOCK_N)
        inside = (start + steps >= first) & (start + steps < end)
        return tl.load(pages + steps // PAGE, mask=inside, other=0)


@triton.jit
def row_offsets(
    pages,
    start,
    head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Offsets [BLOCK_N] in the cache of the rows of the tile at `start`, in elements; int64 where WIDE.

    A row has ROW elements, and the rows of one head in one page begin HEAD_STRIDE after those of the head before.
    """
    slots = tl.arange(0, BLOCK_N) % PAGE  # tiles start at a multiple of BLOCK_N
    if PAGE > BLOCK_N:
        slots += start % PAGE
    if WIDE:
        pages = pages.to(tl.int64)
    return pages * (KV_HEADS * HEAD_STRIDE) + (head * HEAD_STRIDE + slots * ROW)


@triton.jit
def load_rows(cache, offsets, inside, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Rows [BLOCK_N, PADDED_DIM] of the cache; 0 where `inside` [BLOCK_N] is false and past HEAD_DIM."""
    columns = tl.arange(0, PADDED_DIM)
    inside = inside[:, None]
    if HEAD_DIM != PADDED_DIM:
        inside = inside & (columns < HEAD_DIM)[None, :]
    if cache.dtype.element_ty.is_floating():
        return tl.load(cache + offsets[:, None] + columns[None, :], mask=inside, other=0.0)
    else:
        return tl.load(cache + offsets[:, None] + columns[None, :], mask=inside, other=0)


@triton.jit
def multiply(left, right):
    """left @ right in float32. The interpreter multiplies no bfloat16."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32))
    else:
        return tl.dot(left, right)


@triton.jit
def multiply_add(left, right, total):
    """total + left @ right in float32."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    else:
        return tl.dot(left, right, total)


@triton.jit
def for_products(queries, cache):
    """Queries in the type in which keys and values are multiplied: their own, but float16 over a cache of 8 bits, where
    one instruction makes two keys float16 and four make them bfloat16. What is too large becomes the largest."""
    if cache.dtype.element_ty.primitive_bitwidth == 8:
        queries = tl.minimum(tl.maximum(queries.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return queries


@triton.jit
def settle(total):
    """`total` itself. Whoever reads a product in the loop that makes it waits for it there: an empty instruction."""
    if INTERPRETED:
        return total
    else:
        return tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def cap_scores(scores, scale, soft_cap):
    """soft_cap * tanh(scale * scores / soft_cap); the tanh by way of exp2, which is right at both ends."""
    doubled = scores * (2.0 * LOG2_E * scale / soft_cap)
    return soft_cap - (2.0 * soft_cap) / (tl.exp2(doubled) + 1.0)


@triton.jit
def sink_scores(sinks, head, steep, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sinks of rows [BLOCK_M] as scores that `steep` has yet to multiply; row r is query head r % GROUP."""
    own = tl.load(sinks + head * GROUP + tl.arange(0, BLOCK_M) % GROUP)
    return own.to(tl.float32) * LOG2_E / steep


@triton.jit
def find_sequence(starts, slot, sequences, QUERIES: tl.constexpr, CHUNK: tl.constexpr, ROWS_OF_TOKEN: tl.constexpr = 1):
    """The sequence whose query tiles include number `slot`, where sequence s owns starts[s] // QUERIES + s and up.

    That numbering leaves each sequence room for all its tiles whatever its length, so a grid of
    tokens // QUERIES + sequences programs needs no lengths on the host. Where a token has several rows, QUERIES counts
    rows.
    """
    before = 0
    for base in range(0, sequences, CHUNK):
        numbers = base + tl.arange(0, CHUNK)
        first = tl.load(starts + numbers, mask=numbers < sequences, other=0)
        before += tl.sum(((first * ROWS_OF_TOKEN // QUERIES + numbers <= slot) & (numbers < sequences)).to(tl.int32))
    return before - 1
