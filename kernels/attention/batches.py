"""Random batches over a paged cache, for tests and benchmarks: pages in random order, poison where nobody may read.

batch = random_batch(contexts=[100, 17], new=[1, 1], kv_heads=2, group=4, head_dim=64)
attend(*batch.tensors, **batch.options, max_queries=batch.max_queries)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.attention.cache import EIGHT_BIT, CacheLayout
from quantkit.kernels.reference.integer_codes import encode

_POISON = 2**30  # a page that no cache has


@dataclass(frozen=True)
class Batch:
    """What `attend` and its reference take."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # q, keys, values, pages, contexts, query starts
    options: dict[str, Any]
    max_queries: int


def random_batch(
    contexts: Sequence[int],
    new: Sequence[int],
    *,
    kv_heads: int = 2,
    group: int = 4,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float16,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    ancestors: bool = False,
    sinks: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Batch:
    """Sequences of these context lengths, of which the last `new` tokens are new; drawn on `device` from `seed`.

    With `ancestors`, the new tokens of each sequence are a random tree, or several.
    """
    generator = torch.Generator(device).manual_seed(seed)
    pages = [-(-context // page_size) for context in contexts]
    layout = CacheLayout(sum(pages) + 1, kv_heads, page_size, head_dim, cache_dtype or dtype)
    options: dict[str, Any] = {"scale": head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    scales: list[Tensor | None] = [None, None]
    if layout.dtype == EIGHT_BIT:
        scales = [0.03 + 0.02 * torch.rand(kv_heads, generator=generator, device=device) for _ in range(2)]
        options |= {"k_scale": scales[0], "v_scale": scales[1]}
    if ancestors:
        options["ancestors"] = torch.tensor(_random_trees(new, seed), dtype=torch.int64, device=device)
    if layout.codes is None:
        keys, values = (_random_cache(layout, scale, generator) for scale in scales)
    else:
        (keys, options["k_scale"]), (values, options["v_scale"]) = (_random_codes(layout, generator) for _ in range(2))
    table = _random_table(pages, layout.pages).to(device)
    poisoned = (keys, values) if layout.codes is None else (options["k_scale"], options["v_scale"])
    for cache in poisoned:
        _poison_tails(cache, table, contexts, page_size)
    starts = torch.tensor([0, *new]).cumsum(0)
    q = torch.randn(int(starts[-1]), kv_heads * group, head_dim, generator=generator, device=device, dtype=dtype)
    if sinks:
        options["sinks"] = 2 * torch.randn(kv_heads * group, generator=generator, device=device, dtype=dtype)
    lengths = torch.tensor(list(contexts), dtype=torch.int32, device=device)
    return Batch((q, keys, values, table, lengths, starts.int().to(device)), options, max([1, *new]))


def _random_cache(layout: CacheLayout, scale: Tensor | None, generator: torch.Generator) -> Tensor:
    cache = torch.randn(layout.shape, generator=generator, device=generator.device)
    if scale is not None:
        cache /= scale[:, None, None]
    return cache.to(layout.dtype)


def _random_table(pages: Sequence[int], available: int) -> Tensor:
    """Every sequence's pages, at random places; _POISON behind them."""
    table = torch.full((len(pages), max([0, *pages]) + 1), _POISON, dtype=torch.int32)
    order = torch.randperm(available, generator=torch.Generator().manual_seed(available)).int()
    taken = 0
    for row, count in enumerate(pages):
        table[row, :count] = order[taken : taken + count]
        taken += count
    return table


def _random_trees(new: Sequence[int], seed: int) -> list[int]:
    """What each new token sees, as `attend` takes it: a random one before it is its parent, or none is."""
    generator = torch.Generator().manual_seed(seed)
    seen: list[int] = []
    for count in new:
        tree: list[int] = []
        for node in range(count):
            parent = int(torch.randint(-1, node, (1,), generator=generator))
            tree.append((tree[parent] if parent >= 0 else 0) | 1 << node)
        seen += tree
    return seen


def _random_codes(layout: CacheLayout, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes and words of a cache of integers, as views of its pages."""
    assert layout.codes is not None
    shape = (*layout.shape[:3], layout.codes.token_bytes(layout.head_dim))
    codes, words = layout.codes.planes(torch.empty(shape, dtype=torch.uint8, device=generator.device))
    numbers = torch.randn(*layout.shape[:3], layout.head_dim, generator=generator, device=generator.device) + 0.3
    for plane, part in zip((codes, words), encode(numbers, layout.codes), strict=True):
        plane.copy_(part)
    return codes, words


def _poison_tails(cache: Tensor, table: Tensor, contexts: Sequence[int], page_size: int) -> None:
    """NaN in the rows of a last page that the context does not reach."""
    for row, context in enumerate(contexts):
        if context % page_size:
            page = int(table[row, context // page_size])
            cache[page, :, context % page_size :] = float("nan") if cache.is_floating_point() else -1  # NaN as well
