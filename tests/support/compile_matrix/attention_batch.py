"""Batches for attention that have shapes and no memory: launchers ask for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.attention.attend import attend

_KV_HEADS = 2


@dataclass(frozen=True)
class Heads:
    size: int = 128
    group: int = 4  # how many share keys
    cache_dtype: torch.dtype | None = None  # None: that of the queries
    page_size: int = 16


def launch_attention(
    new: Sequence[int], heads: Heads, dtype: torch.dtype, *, table: int = 32, pages: int = 64, **options: Any
) -> None:
    """Sequences with so many new tokens each, over a cache of `pages`, of which the table lists up to `table` each.

    With `ancestors=True` the new tokens are trees of guesses; with `sinks=True` every head has one.
    """

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

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
