"""Batches for attention that have shapes and no memory: launchers ask for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.attention.attend import attend
from quantkit.kernels.attention.latent.attend import attend_latents

_KV_HEADS = 2
_RANK, _ROPE, _LATENT_HEADS = 512, 64, 16  # of DeepSeek's smallest; larger ones have more heads


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
    cache = empty(pages, _KV_HEADS, heads.page_size, heads.size, dtype=heads.cache_dtype or dtype)
    scale = empty(_KV_HEADS, dtype=torch.float32) if heads.cache_dtype else None
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


def launch_latents(
    new: Sequence[int], kept: torch.dtype | None, splits: int, dtype: torch.dtype, *, ancestors: bool = False
) -> None:
    """The same over a cache of latents; `kept` is its dtype where that is another."""
    sequences, tokens = len(new), sum(new)
    attend_latents(
        empty(tokens, _LATENT_HEADS, _RANK + _ROPE, dtype=dtype),
        empty(64, 1, 16, _RANK + _ROPE, dtype=kept or dtype),
        empty(sequences, 32, dtype=torch.int32),
        empty(sequences, dtype=torch.int32),
        empty(sequences + 1, dtype=torch.int32),
        rank=_RANK,
        scale=0.1,
        max_queries=max(new),
        cache_scale=empty(1, dtype=torch.float32) if kept else None,
        ancestors=empty(tokens, dtype=torch.int64) if ancestors else None,
        splits=splits,
    )
