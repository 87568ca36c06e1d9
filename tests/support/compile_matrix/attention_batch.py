"""Batches for attention that have shapes and no memory: launchers ask for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.attention.attend import attend
from quantkit.kernels.attention.integer_codes import BY_DTYPE
from quantkit.kernels.attention.latent.attend import attend_latents
from quantkit.kernels.attention.latent.expanded import attend_expanded
from quantkit.kernels.attention.latent.pieces import PromptPieces
from quantkit.kernels.attention.latent.rotate import rotate_latent

_KV_HEADS = 2


@dataclass(frozen=True)
class Heads:
    size: int = 128
    group: int = 4  # how many share keys
    cache_dtype: torch.dtype | None = None  # None: that of the queries
    page_size: int = 16


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch_attention(
    new: Sequence[int], heads: Heads, dtype: torch.dtype, *, table: int = 32, pages: int = 64, **options: Any
) -> None:
    """Sequences with so many new tokens each, over a cache of `pages`, of which the table lists up to `table` each.

    With `ancestors=True` the new tokens are trees of guesses; with `sinks=True` every head has one.
    """
    sequences, tokens = len(new), sum(new)
    codes = None if heads.cache_dtype is None else BY_DTYPE.get(heads.cache_dtype)
    if codes is None:
        cache = empty(pages, _KV_HEADS, heads.page_size, heads.size, dtype=heads.cache_dtype or dtype)
        scale = empty(_KV_HEADS, dtype=torch.float32) if heads.cache_dtype else None
    else:
        width = codes.token_bytes(heads.size)
        cache, scale = codes.planes(empty(pages, _KV_HEADS, heads.page_size, width, dtype=torch.uint8))
    if options.pop("ancestors", False):
        options["ancestors"] = empty(tokens, dtype=torch.int64)
    if options.pop("sinks", False):
        options["sinks"] = empty(_KV_HEADS * heads.group, dtype=dtype)
    attend(
        empty(tokens, _KV_HEADS * heads.group, heads.size, dtype=dtype),
        cache,
        cache,
        empty(sequences, table, dtype=torch.int32),
        empty(sequences, dtype=torch.int32),
        empty(sequences + 1, dtype=torch.int32),
        scale=heads.size**-0.5,
        max_queries=max(new),
        k_scale=scale,
        v_scale=scale,
        **options,
    )


@dataclass(frozen=True)
class Latents:
    heads: int = 16  # of DeepSeek's smallest; larger ones have 128
    cache_dtype: torch.dtype | None = None  # None: that of the queries
    rank: int = 512
    rope: int = 64
    head: int = 128  # numbers of a key that do not turn, and of a value
    pages: int = 64


def _latent_inputs(latents: Latents, tokens: int, dtype: torch.dtype, width: int) -> tuple[Tensor, ...]:
    """Queries of `width` numbers, their turned part, the cache."""
    queries = (empty(tokens, latents.heads, size, dtype=dtype) for size in (width, latents.rope))
    return *queries, empty(latents.pages, 1, 16, latents.rank + latents.rope, dtype=latents.cache_dtype or dtype)


def launch_latents(
    new: Sequence[int], latents: Latents, splits: int | None, dtype: torch.dtype, *, ancestors: bool = False
) -> None:
    """The same over a cache of latents, in absorbed form."""
    sequences, tokens = len(new), sum(new)
    attend_latents(
        *_latent_inputs(latents, tokens, dtype, latents.rank),
        empty(sequences, 32, dtype=torch.int32),
        empty(sequences, dtype=torch.int32),
        empty(sequences + 1, dtype=torch.int32),
        scale=0.1,
        max_queries=max(new),
        cache_scale=empty(1, dtype=torch.float32) if latents.cache_dtype else None,
        ancestors=empty(tokens, dtype=torch.int64) if ancestors else None,
        splits=splits,
    )


def launch_expanded(latents: Latents, dtype: torch.dtype, new: int = 300) -> None:
    """Two pieces of prompts over latents, in expanded form."""
    q, turned, cache = _latent_inputs(latents, new, dtype, latents.head)
    firsts, starts = empty(2, dtype=torch.int32), empty(3, dtype=torch.int32)
    pieces = PromptPieces(new, new + 100, empty(new + 100, dtype=torch.int64), firsts, starts, starts)
    up = empty(latents.heads, 2 * latents.head, latents.rank, dtype=dtype)
    scale = empty(1, dtype=torch.float32) if latents.cache_dtype else None
    attend_expanded(q, turned, cache, up, pieces, torch.empty_like(q), scale=0.1, cache_scale=scale)


def launch_rotate(latents: Latents, interleaved: bool, dtype: torch.dtype, tokens: int = 3) -> None:
    _, q, cache = _latent_inputs(latents, tokens, dtype, 1)
    at = empty(tokens, dtype=torch.int64)
    table = empty(32, latents.rope // 2, dtype=torch.float32)
    scales = empty(1, dtype=torch.float32) if latents.cache_dtype else None
    kept, norm = empty(tokens, latents.rank + latents.rope, dtype=dtype), empty(latents.rank, dtype=dtype)
    rotate_latent(q, kept, norm, at, table, table, at, cache, eps=1e-6, interleaved=interleaved, scales=scales)
