"""Attention over a paged cache of latents, for any batch: answers, guesses, chunks of prompts. Not used by the runtime
yet, which refuses latent attention on a GPU: it was compiled and interpreted, and never ran on one.

    attend_latents(q, cache, page_table, context_lengths, query_starts, rank=..., scale=..., max_queries=...)

Layout   q [tokens, heads, rank + rope], bfloat16 or float16: queries in the latents' space, their turned part last
         cache [pages, 1, page_size, rank + rope], contiguous, in q's dtype or float8_e4m3fn: a latent, then its key
         tables, lengths, starts and ancestors as in `attention/attend.py`
         out [tokens, heads, rank]; rows that belong to no sequence are zero
Meaning  `reference.latent.attend_latents`
Limits   rank at most 512, rope at most 64; page_size a power of two, 16 or more; with ancestors at most 62 new tokens

Grids depend on shapes and max_queries alone, so a call may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.attention.cache import EIGHT_BIT, SMALLEST_PAGE
from quantkit.kernels.attention.decode_plan import MOST_NODES
from quantkit.kernels.attention.latent.kernel import add_parts, attend_part
from quantkit.kernels.card import card_of
from quantkit.kernels.chain import chained
from quantkit.kernels.checks import HALVES, check_contiguous, check_dtype, check_rows, check_same_device, check_shape

NAME = "latent attention"
LARGEST_RANK, LARGEST_ROPE = 512, 64
BLOCK_M, BLOCK_N = 16, 32  # rows and tokens: sums of 16 rows of 512 are 64 registers a thread
MOST_SPLITS = 16


def attend_latents(
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    *,
    rank: int,
    scale: float,
    max_queries: int,
    cache_scale: Tensor | None = None,
    ancestors: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """What the heads of new tokens attend to; see the top of this file. `splits` overrides what shapes suggest."""
    _check(q, cache, rank, scale, max_queries, cache_scale, ancestors)
    _check_batch(q, page_table, context_lengths, query_starts)
    tokens, heads, width = q.shape
    out = torch.zeros(tokens, heads, rank, dtype=q.dtype, device=q.device)
    sequences, blocks = page_table.shape[0], -(-max_queries * heads // BLOCK_M)
    if tokens == 0 or sequences == 0:
        return out
    page = cache.shape[2]
    parts = splits or _choose_splits(sequences * blocks, page_table.shape[1] * page, q.device)
    partial = torch.empty(tokens * heads * parts * rank if parts > 1 else 0, dtype=torch.float32, device=q.device)
    stats = torch.zeros(tokens * heads * parts * 2 if parts > 1 else 0, dtype=torch.float32, device=q.device)
    padded = max(16, triton.next_power_of_2(rank))  # the smallest that a matrix instruction takes
    attend_part[(parts, blocks, sequences)](
        *(q, out, cache, page_table, context_lengths, query_starts, cache_scale, ancestors, partial, stats),
        *(float(scale), page_table.stride(0), *q.stride()[:2]),
        HEADS=heads,
        RANK=rank,
        ROPE=width - rank,
        PADDED_RANK=padded,
        PADDED_ROPE=max(16, triton.next_power_of_2(width - rank)),
        PAGE=page,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        SPLITS=parts,
        WIDE=cache.numel() >= 2**31,
        num_warps=8 if cache.dtype == EIGHT_BIT else 4,  # to convert a tile takes registers that 4 do not have
        num_stages=2,
        **chained(q.device),
    )
    if parts > 1:
        add_parts[(tokens * heads,)](
            *(out, partial, stats),
            RANK=rank,
            PADDED_RANK=padded,
            SPLITS=parts,
            PADDED_SPLITS=triton.next_power_of_2(parts),
            num_warps=4,
            **chained(q.device),
        )
    return out


def _choose_splits(programs: int, reach: int, device: torch.device) -> int:
    """Enough parts for two programs on every multiprocessor; none is less than a tile."""
    tiles = max(1, -(-reach // BLOCK_N))
    return max(1, min(2 * card_of(device).processors // programs, tiles, MOST_SPLITS))


def _check(
    q: Tensor,
    cache: Tensor,
    rank: int,
    scale: float,
    max_queries: int,
    cache_scale: Tensor | None,
    ancestors: Tensor | None,
) -> None:
    check_dtype(NAME, "q", q, HALVES)
    check_shape(NAME, "q", q, (None, None, None))
    check_rows(NAME, "q", q)
    width = q.shape[2]
    if not 0 < rank <= LARGEST_RANK or not 0 < width - rank <= LARGEST_ROPE:
        raise InputError(
            f"{NAME}: queries have {rank} + {width - rank} numbers, but a latent has 1 to {LARGEST_RANK} and its key "
            f"1 to {LARGEST_ROPE}"
        )
    check_dtype(NAME, "cache", cache, (q.dtype, EIGHT_BIT))
    check_shape(NAME, "cache", cache, (None, 1, None, width))
    check_contiguous(NAME, "cache", cache)
    page = cache.shape[2]
    if page < SMALLEST_PAGE or page & (page - 1):
        raise InputError(f"{NAME}: page_size is {page}, but must be a power of two, {SMALLEST_PAGE} or more")
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
    check_same_device(NAME, q=q, cache=cache, cache_scale=cache_scale, ancestors=ancestors)


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
