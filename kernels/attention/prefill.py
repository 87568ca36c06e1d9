"""Attention of many new tokens per sequence over a paged cache: prefill, in chunks or after a reused prefix.

Layout   q, out [tokens, heads, head_dim], any strides but the last; the cache as in `cache.py`
Meaning  `reference.attention.attend`
Limits   query heads per KV head at most 64; sequences whose new tokens * group are at most `skip_rows` are left alone

One program serves BLOCK_M rows: BLOCK_M // GROUP neighbouring new tokens times the query heads of one KV head, which
all read the same keys. The last tokens of a sequence come first, since they look at the most keys; all tiles of a
sequence come together, since they share its keys in the second-level cache. Tiles of keys that every row sees skip
the mask; one loop takes both kinds, since a second loop would wait for its first keys again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.attention.cache import CacheLayout
from quantkit.kernels.attention.tiles import (
    LOG2_E,
    LOWEST,
    cap_scores,
    find_sequence,
    load_pages,
    load_rows,
    multiply,
    multiply_add,
    row_offsets,
)

_SEQUENCES_AT_ONCE = 256  # that a program looks through to find its own


@dataclass(frozen=True)
class PrefillConfig:
    """How the prefill kernel is compiled: rows and keys of a tile, warps, stages of the pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(padded_dim: int) -> PrefillConfig:
    """The default for a head dimension."""
    if padded_dim == 256:
        return PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)
    if padded_dim == 64:
        return PrefillConfig(block_m=128, block_n=64, num_warps=4, num_stages=3)
    return PrefillConfig(block_m=128, block_n=128, num_warps=8, num_stages=3)


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
    pages = load_pages(table, begin, oldest, context, PAGE, BLOCK_N)  # before the queries: keys wait for it

    row = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, PADDED_DIM)
    mine = (row < QUERIES * GROUP) & (query + row // GROUP < new)
    held = mine[:, None] & (columns < HEAD_DIM)[None, :]
    token = (first + query + row // GROUP).to(tl.int64)
    q_head_of_row = head * GROUP + row % GROUP
    queries = tl.load(q + (token * q_token + q_head_of_row * q_head)[:, None] + columns[None, :], mask=held, other=0.0)
    position = earliest + row // GROUP
    if k_scale is not None:
        scale = scale * tl.load(k_scale + head)
    steep = scale * LOG2_E if soft_cap is None else LOG2_E  # capped scores are scaled already

    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, latest + 1, BLOCK_N):
        following = load_pages(table, start + BLOCK_N, oldest, context, PAGE, BLOCK_N)
        tokens = start + tl.arange(0, BLOCK_N)
        inside = tokens < context
        if window is not None:
            inside = inside & (tokens >= oldest)
        offsets = row_offsets(pages, start, head, KV_HEADS, PAGE, HEAD_DIM, BLOCK_N, WIDE)
        keys = load_rows(cache_k, offsets, inside, HEAD_DIM, PADDED_DIM)
        values = load_rows(cache_v, offsets, inside, HEAD_DIM, PADDED_DIM)
        scores = multiply(queries, tl.trans(keys.to(queries.dtype)))
        if soft_cap is not None:
            scores = cap_scores(scores, scale, soft_cap)
        if (start >= clear_to) | (start < clear_from):
            seen = tokens[None, :] <= position[:, None]
            if window is not None:
                seen = seen & (tokens[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2((top - highest) * steep)
        weight = tl.exp2(scores * steep - (highest * steep)[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        acc = multiply_add(weight.to(queries.dtype), values.to(queries.dtype), acc * shrink[:, None])
        top = highest
        pages = following

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if v_scale is not None:
        acc = acc * tl.load(v_scale + head)
    places = out + (token * out_token + q_head_of_row * out_head)[:, None] + columns[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=held)


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
    )
