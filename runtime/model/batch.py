"""What a decoder reads and writes in one step: the tokens of a batch, and the paged cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from quantkit.kernels.attention.integer_codes import IntegerCodes
from quantkit.runtime.core.kv_dtypes import KvKind


@dataclass(frozen=True)
class Batch:
    """The tokens of one step, in device memory: the new tokens of all sequences behind each other."""

    ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    kv_slots: Tensor  # int64 [tokens], where their keys and values go: page * page_size + offset
    page_table: Tensor  # int32 [sequences, pages]
    context_lengths: Tensor  # int32 [sequences], new tokens included
    query_starts: Tensor  # int32 [sequences + 1]
    max_queries: int  # no sequence has more new tokens
    ancestors: Tensor | None = None  # int64 [tokens], where new tokens are trees: see `kernels/attention/attend.py`
    host_lengths: tuple[list[int], list[int]] | None = None  # query_starts and context_lengths, where the host knows
    # them: not in a graph, which is replayed with others


class LayerCache(NamedTuple):
    """Of one layer, as `rotate_and_cache` and `attend` take it."""

    keys: Tensor  # [pages, kv_heads, page_size, head_dim], of 4 bits half as many
    values: Tensor
    k_scale: Tensor | None  # of a KV head in an 8-bit cache; the words of a cache of integers
    v_scale: Tensor | None
    key_centres: Tensor | None  # float32 [kv_heads, head_dim], which keys are kept without


@dataclass(frozen=True)
class KvCache:
    """Keys and values of all layers: one tensor, so that a page is copied at once.

    Latents are keys and values in one: 1 instead of 2, and one head.
    """

    pages: Tensor  # [layers, 2, pages, kv_heads, page_size, head_dim]; see `ModelConfig.cache_entry`
    scales: Tensor | None = None  # float32 [layers, 2, kv_heads], of a cache in FP8
    codes: IntegerCodes | None = None  # what its bytes are, where it is one of integers
    key_centres: Tensor | None = None  # float32 [layers, kv_heads, head_dim], see `device/key_centres.py`

    @property
    def kind(self) -> KvKind:
        return KvKind(self.pages.dtype, self.codes)

    @property
    def page_size(self) -> int:
        return self.pages.shape[4]

    @property
    def num_pages(self) -> int:
        return self.pages.shape[2]

    @cached_property
    def planes(self) -> tuple[Tensor, ...]:
        """Views [layers, 2, pages, kv_heads, page_size, any]: what is kept of single tokens."""
        if self.codes is None:
            return (self.pages,)
        rows, words = self.codes.planes(self.pages)
        return rows, words[..., None]

    @cached_property
    def layers(self) -> tuple[LayerCache, ...]:
        """Not of latents, which are no pairs."""
        none = [None] * len(self.pages)
        centres = none if self.key_centres is None else self.key_centres
        if self.codes is None:
            pages, scales = self.pages, [(None, None) for _ in none] if self.scales is None else self.scales
        else:
            pages, scales = self.codes.planes(self.pages)
        each = zip(pages, scales, centres, strict=True)
        return tuple(LayerCache(k, v, k_scale, v_scale, centre) for (k, v), (k_scale, v_scale), centre in each)
