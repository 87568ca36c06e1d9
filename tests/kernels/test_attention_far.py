"""Caches of more elements than an int32 can count: what lies in their last pages is read and written there."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.kernels.attention.attend import attend
from quantkit.kernels.attention.batches import Batch, random_batch
from quantkit.kernels.attention.cache import layout_of
from quantkit.kernels.rotary import rotate_and_cache

pytestmark = pytest.mark.gpu

HEADS, HEAD_DIM, PAGE = 8, 128, 16
PAGES = 2**31 // (HEADS * HEAD_DIM * PAGE) + 100


def moved_to_the_end(batch: Batch) -> tuple[Tensor, ...]:
    """The same batch in the last pages of a cache that is too large for 32 bits."""
    q, keys, values, table, *lengths = batch.tensors
    far = [cache.new_empty(PAGES, *cache.shape[1:]) for cache in (keys, values)]
    for cache, small in zip(far, (keys, values), strict=True):
        cache[-len(small) :] = small
    assert layout_of(*far).needs_wide_offsets
    return q, *far, torch.where(table < len(keys), table + PAGES - len(keys), table), *lengths


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=("half", "fp8"))
@pytest.mark.parametrize(
    ("contexts", "new"),
    [([700, 33], [1, 1]), ([700, 33], [5, 2]), ([700, 300], [600, 1]), ([2000], [2000])],
    ids=("answers", "guesses", "both", "prompt"),
)
def test_attention(contexts: list[int], new: list[int], cache_dtype: torch.dtype | None) -> None:
    sizes: dict[str, Any] = {"kv_heads": HEADS, "head_dim": HEAD_DIM, "page_size": PAGE, "cache_dtype": cache_dtype}
    batch = random_batch(contexts, new, dtype=torch.bfloat16, device="cuda", **sizes)
    options = batch.options | {"max_queries": batch.max_queries}
    near, far = (attend(*tensors, **options) for tensors in (batch.tensors, moved_to_the_end(batch)))
    assert torch.isfinite(far).all()
    assert torch.equal(near, far)


def test_what_is_written() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(3, 4 * HEADS * HEAD_DIM, generator=generator, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(2, 32, HEAD_DIM // 2, generator=generator, device="cuda")
    positions = torch.arange(3, device="cuda")
    written = []
    for pages in (2, PAGES):
        keys, values = torch.zeros(2, pages, HEADS, PAGE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        slots = pages * PAGE - 5 + positions
        rotate_and_cache(qkv.clone(), positions, cos, sin, slots, keys, values, 2 * HEADS)
        written.append((keys[-1].clone(), values[-1].clone()))
        assert not keys[:-1].any()
    (near_keys, near_values), (far_keys, far_values) = written
    assert near_keys.any()
    assert near_values.any()
    assert torch.equal(near_keys, far_keys)
    assert torch.equal(near_values, far_values)
