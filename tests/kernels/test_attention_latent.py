"""Attention over a paged cache of latents: against its meaning in torch, however it is divided; what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.attention.batches import random_batch
from quantkit.kernels.attention.latent.attend import attend_latents
from quantkit.kernels.reference import latent as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error

pytestmark = pytest.mark.kernel

FP8 = torch.float8_e4m3fn


def latent_batch(
    contexts: list[int],
    new: list[int],
    device: str,
    *,
    heads: int = 5,
    rank: int = 40,
    rope: int = 24,
    kept: torch.dtype | None = None,
    **more: Any,
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Pages in any order, NaN behind contexts, two tokens of nobody at the end: what kernel and reference take."""
    batch = random_batch(contexts, new, kv_heads=1, group=heads, head_dim=64, device=device, cache_dtype=kept, **more)
    q, cache, _, *rest = batch.tensors
    assert rank + rope == 64
    q = torch.cat((q, q.new_ones(2, *q.shape[1:])))
    options = {"rank": rank, "scale": 0.2}
    if kept is not None:
        options["cache_scale"] = batch.options["k_scale"]
    if more.get("ancestors"):
        options["ancestors"] = torch.nn.functional.pad(batch.options["ancestors"], (0, 2))
    return (q, cache, *rest), options


def check(tensors: tuple[Tensor, ...], options: dict[str, Any], max_queries: int, splits: int | None) -> None:
    found = attend_latents(*tensors, **options, max_queries=max_queries, splits=splits)
    exact = reference.attend_latents(tensors[0].float(), *tensors[1:], **options)
    assert relative_error(found, exact) < LARGEST_ERROR["float16"]
    assert not found[-2:].any()


CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "answers": ([100, 17, 33], [1, 1, 1], {}),
    "a single token": ([1], [1], {"heads": 1}),
    "padding": ([40, 0, 50], [1, 0, 1], {}),
    "16 heads": ([70], [1], {"heads": 16}),
    "rank 48": ([70, 20], [1, 1], {"rank": 48, "rope": 16}),
    "pages of 64": ([150, 64], [1, 2], {"page_size": 64}),
    "guesses": ([100, 5, 33], [4, 5, 1], {}),
    "a chunk of a prompt": ([70], [30], {"heads": 3}),
    "trees": ([60, 9], [6, 9], {"ancestors": True}),
    "8 bits": ([100, 17], [1, 3], {"kept": FP8}),
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_as_in_torch(name: str, splits: int, device: str) -> None:
    contexts, new, more = CASES[name]
    check(*latent_batch(contexts, new, device, **more), max_queries=max(new), splits=splits)


def test_splits_that_shapes_suggest(device: str) -> None:
    tensors, options = latent_batch([200, 3], [1, 1], device)
    check(tensors, options, max_queries=1, splits=None)
    assert attend_latents(tensors[0][:0], *tensors[1:], **options, max_queries=1).shape == (0, 5, 40)


def test_what_is_refused(device: str) -> None:
    tensors, options = latent_batch([20], [2], device)
    q, cache, table, contexts, starts = tensors
    wrong: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
        "64 . 0 numbers": (tensors, {"rank": 64}),
        "max_queries is 0": (tensors, {"max_queries": 0}),
        "scale is 0": (tensors, {"scale": 0.0}),
        "needs cache_scale": (tensors, {"cache_scale": torch.ones(1, device=device)}),
        "page_size is 8": ((q, cache[:, :, :8].contiguous(), table, contexts, starts), {}),
        "cache has shape": ((q, cache[..., :60].contiguous(), table, contexts, starts), {}),
        "cache is float32": ((q, cache.float(), table, contexts, starts), {}),
        "query_starts has shape": ((q, cache, table, contexts, starts[:1]), {}),
        "page_table is int64": ((q, cache, table.long(), contexts, starts), {}),
        "must be from 1 to 62": (tensors, {"max_queries": 63, "ancestors": torch.ones(4, dtype=torch.long)}),
    }
    for words, (given, changes) in wrong.items():
        with pytest.raises(InputError, match=words):
            attend_latents(*given, **{"max_queries": 2} | options | changes)
