"""Attention over a paged cache of latents in absorbed form: answers, guesses, short pieces of prompts.

    attend_latents(q, turned, cache, page_table, context_lengths, query_starts, scale=..., max_queries=...)

Layout   q [tokens, heads, rank], bfloat16 or float16: queries in the latents' space; turned [tokens, heads, rope]: the
         part of them that turned. Any strides but the last
         cache [pages, 1, page_size, rank + rope], contiguous, in q's dtype or float8_e4m3fn: a latent, then its key
         tables, lengths, starts and ancestors as in `attention/attend.py`
         out [tokens, heads, rank]; rows that belong to no sequence are not written
Meaning  `reference.latent.attend_latents`
Limits   `limits.py`; with ancestors at most 62 new tokens

Grids depend on shapes and max_queries alone and nothing is read back, so a call may be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.attention.cache import EIGHT_BIT
from quantkit.kernels.attention.decode_plan import MOST_NODES
from quantkit.kernels.attention.latent.kernel import add_parts, attend_part
from quantkit.kernels.attention.latent.limits import check_latents
from quantkit.kernels.card import Card, card_of
from quantkit.kernels.chain import chained
from quantkit.kernels.checks import HALVES, check_contiguous, check_dtype, check_rows, check_same_device, check_shape

NAME = "latent attention"
MOST_SPLITS = 64
_PROGRAMS_PER_SM = 2
_MOST_ROWS = 32  # of a block
_SEQUENCES_AT_ONCE = 256  # that a program looks through to find its own
_ADDED_COLUMNS, _ADDED_PARTS = 128, 16  # by a program, and of these so many at a time


@dataclass(frozen=True)
class LatentConfig:
    """How the kernel is compiled: rows and tokens of a tile, warps, stages of the pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 2


def latent_config(rows: int, itemsize: int) -> LatentConfig:
    """For so many rows of a sequence. Sums of 16 rows of 512 numbers are 64 registers a thread of 4 warps, those of 32
    rows as many of 8, which load a latent half as often; with 64 rows compiled code spills on Hopper and Blackwell, and
    so it does with 32 where 8 bits are converted."""
    if itemsize == 1:
        return LatentConfig(block_m=16, block_n=32, num_warps=8)
    few = rows < _MOST_ROWS
    return LatentConfig(block_m=16 if few else _MOST_ROWS, block_n=32, num_warps=4 if few else 8)


@dataclass(frozen=True)
class LatentScratch:
    """Where the parts of one call meet; calls in a row may share one."""

    partial: Tensor  # float32 [rows * parts * rank]
    stats: Tensor  # float32 [rows * parts * 2]: largest score, sum of weights

    @classmethod
    def allocate(cls, device: torch.device, parts_of_rows: int, rank: int) -> LatentScratch:
        sizes = (parts_of_rows * rank, parts_of_rows * 2)
        return cls(*(torch.empty(size, dtype=torch.float32, device=device) for size in sizes))

    def holds(self, parts_of_rows: int, rank: int) -> bool:
        return self.partial.numel() >= parts_of_rows * rank and self.stats.numel() >= parts_of_rows * 2


def make_latent_scratch(device: torch.device, rank: int) -> LatentScratch:
    """Enough for every call: contexts are divided only where few programs have work."""
    return LatentScratch.allocate(device, _PROGRAMS_PER_SM * card_of(device).processors * _MOST_ROWS, rank)


def attend_latents(
    q: Tensor,
    turned: Tensor,
    cache: Tensor,
    page_table: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    max_queries: int,
    cache_scale: Tensor | None = None,
    ancestors: Tensor | None = None,
    scratch: LatentScratch | None = None,
    splits: int | None = None,
    config: LatentConfig | None = None,
) -> Tensor:
    """What the heads of new tokens attend to; see the top of this file.

    `scratch` saves two allocations a call; `splits` and `config` override what shapes suggest.
    """
    _check(q, turned, cache, scale, max_queries, cache_scale, ancestors)
    _check_batch(q, page_table, context_lengths, query_starts)
    tokens, heads, rank = q.shape
    rope, page, sequences = turned.shape[2], cache.shape[2], page_table.shape[0]
    out = torch.empty(tokens, heads, rank, dtype=q.dtype, device=q.device)
    if tokens == 0 or sequences == 0:
        return out
    way = config or latent_config(max_queries * heads, cache.dtype.itemsize)
    even = tokens >= sequences * max_queries  # all have as many new tokens
    blocks = triton.cdiv(max_queries * heads, way.block_m)
    slots = sequences * blocks if even else tokens * heads // way.block_m + sequences
    parts = splits or _choose_splits(slots, page_table.shape[1] * page, way, card_of(q.device))
    space = _scratch_for(scratch, q, parts)
    attend_part[(slots * parts,)](
        *(q, turned, out, cache, page_table, context_lengths, query_starts, cache_scale, ancestors),
        *(space.partial, space.stats, float(scale), page_table.stride(0), *q.stride()[:2], *turned.stride()[:2]),
        *(parts, sequences, blocks),
        HEADS=heads,
        RANK=rank,
        ROPE=rope,
        PADDED_RANK=max(16, triton.next_power_of_2(rank)),  # the smallest that a matrix instruction takes
        PADDED_ROPE=max(16, triton.next_power_of_2(rope)),
        PAGE=page,
        BLOCK_M=way.block_m,
        BLOCK_N=way.block_n,
        EVEN=even,
        DIVIDED=parts > 1,
        SEQUENCES_AT_ONCE=_SEQUENCES_AT_ONCE,
        WIDE=cache.numel() >= 2**31,
        num_warps=way.num_warps,
        num_stages=way.num_stages,
        **chained(q.device),
    )
    if parts > 1:
        add_parts[(tokens * heads, triton.cdiv(rank, _ADDED_COLUMNS))](
            *(out, space.partial, space.stats, query_starts, parts, sequences),
            HEADS=heads,
            RANK=rank,
            COLUMNS=_ADDED_COLUMNS,
            CHUNK=_ADDED_PARTS,
            num_warps=4,
            **chained(q.device),
        )
    return out


def _choose_splits(slots: int, reach: int, config: LatentConfig, card: Card) -> int:
    """Enough parts for two programs on every multiprocessor; none is less than a tile."""
    tiles = max(1, -(-reach // config.block_n))
    return max(1, min(_PROGRAMS_PER_SM * card.processors // slots, tiles, MOST_SPLITS))


def _scratch_for(given: LatentScratch | None, q: Tensor, parts: int) -> LatentScratch:
    tokens, heads, rank = q.shape
    needed = tokens * heads * parts if parts > 1 else 0
    if given is None:
        return LatentScratch.allocate(q.device, needed, rank)
    if not given.holds(needed, rank):
        raise InputError(f"{NAME}: the scratch is too small for {needed} parts of rows; use make_latent_scratch(...)")
    return given


def _check(
    q: Tensor,
    turned: Tensor,
    cache: Tensor,
    scale: float,
    max_queries: int,
    cache_scale: Tensor | None,
    ancestors: Tensor | None,
) -> None:
    check_dtype(NAME, "q", q, HALVES)
    check_dtype(NAME, "turned", turned, (q.dtype,))
    check_shape(NAME, "q", q, (None, None, None))
    check_shape(NAME, "turned", turned, (*q.shape[:2], None))
    check_rows(NAME, "q", q)
    check_rows(NAME, "turned", turned)
    check_dtype(NAME, "cache", cache, (q.dtype, EIGHT_BIT))
    check_shape(NAME, "cache", cache, (None, 1, None, q.shape[2] + turned.shape[2]))
    check_contiguous(NAME, "cache", cache)
    check_latents(NAME, q.shape[2], turned.shape[2], cache.shape[2])
    if (cache.dtype == EIGHT_BIT) != (cache_scale is not None):
        raise InputError(f"{NAME}: a cache of 8 bits needs cache_scale, and no other takes one")
    if cache_scale is not None:
        check_dtype(NAME, "cache_scale", cache_scale, (torch.float32,))
        check_shape(NAME, "cache_scale", cache_scale, (1,))
    if ancestors is not None:
        check_dtype(NAME, "ancestors", ancestors, (torch.int64,))
        check_shape(NAME, "ancestors", ancestors, (q.shape[0],))
        check_contiguous(NAME, "ancestors", ancestors)
    most = MOST_NODES if ancestors is not None else max_queries
    if not 1 <= max_queries <= most:
        raise InputError(f"{NAME}: max_queries is {max_queries}, but must be from 1 to {max(most, 1)}")
    if not 0.0 < scale < 1e6:
        raise InputError(f"{NAME}: scale is {scale}, but must be positive")
    check_same_device(NAME, q=q, turned=turned, cache=cache, cache_scale=cache_scale, ancestors=ancestors)


def _check_batch(q: Tensor, page_table: Tensor, context_lengths: Tensor, query_starts: Tensor) -> None:
    check_shape(NAME, "page_table", page_table, (None, None))
    check_rows(NAME, "page_table", page_table)
    sequences = page_table.shape[0]
    check_shape(NAME, "context_lengths", context_lengths, (sequences,))
    check_shape(NAME, "query_starts", query_starts, (sequences + 1,))
    check_contiguous(NAME, "context_lengths", context_lengths)
    check_contiguous(NAME, "query_starts", query_starts)
    named = {"page_table": page_table, "context_lengths": context_lengths, "query_starts": query_starts}
    for name, tensor in named.items():
        check_dtype(NAME, name, tensor, (torch.int32,))
    check_same_device(NAME, q=q, **named)
