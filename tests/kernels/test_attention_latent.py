"""Attention over a paged cache of latents: against its meaning in torch, however it is divided; what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.attention.batches import random_batch
from quantkit.kernels.attention.latent.attend import (
    LatentConfig,
    LatentScratch,
    attend_latents,
    latent_config,
    make_latent_scratch,
)
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
    options: dict[str, Any] = {"scale": 0.2}
    if kept is not None:
        options["cache_scale"] = batch.options["k_scale"]
    if more.get("ancestors"):
        options["ancestors"] = torch.nn.functional.pad(batch.options["ancestors"], (0, 2))
    return (*q.split((rank, rope), dim=2), cache, *rest), options


def check(tensors: tuple[Tensor, ...], options: dict[str, Any], max_queries: int, **how: Any) -> None:
    found = attend_latents(*tensors, **options, max_queries=max_queries, **how)
    exact = reference.attend_latents(tensors[0].float(), *tensors[1:], **options)
    assert relative_error(found[:-2], exact[:-2]) < LARGEST_ERROR["float16"]


CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "answers": ([100, 17, 33], [1, 1, 1], {}),
    "a single token": ([1], [1], {"heads": 1}),
    "padding": ([40, 0, 50], [1, 0, 1], {}),
    "16 heads": ([70], [1], {"heads": 16}),
    "rank 48": ([70, 20], [1, 1], {"rank": 48, "rope": 16}),
    "pages of 64": ([150, 64], [1, 2], {"page_size": 64}),
    "guesses": ([100, 5, 33], [4, 5, 1], {}),
    "a chunk of a prompt": ([70], [30], {"heads": 3}),
    "a prompt beside answers": ([20, 41, 40, 12], [1, 1, 9, 12], {"heads": 3}),
    "trees": ([60, 9], [6, 9], {"ancestors": True}),
    "8 bits": ([100, 17], [1, 3], {"kept": FP8}),
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_as_in_torch(name: str, splits: int, device: str) -> None:
    contexts, new, more = CASES[name]
    check(*latent_batch(contexts, new, device, **more), max_queries=max(new), splits=splits)


def test_blocks_of_more_rows(device: str) -> None:
    """Where all sequences are alike, and where they are not."""
    for new in ([7, 7], [3, 12]):
        tensors, options = latent_batch([60, 33], new, device, heads=10)
        check(tensors, options, max_queries=max(new), config=LatentConfig(block_m=64, block_n=32, num_warps=8))
    assert {latent_config(rows, 2).block_m for rows in (1, 16, 31, 32, 500)} == {16, 32}


def test_splits_that_shapes_suggest(device: str) -> None:
    tensors, options = latent_batch([200, 3], [1, 1], device)
    check(tensors, options, max_queries=1)
    assert attend_latents(*(one[:0] for one in tensors[:2]), *tensors[2:], **options, max_queries=1).shape[0] == 0


def test_a_scratch_serves_calls_in_a_row(device: str) -> None:
    """What an earlier call left there is not read: a part without tokens says so."""
    scratch = make_latent_scratch(torch.device(device), 40)
    scratch.stats.fill_(float("nan"))
    for contexts in ([200, 150], [9, 140], [33, 1]):
        tensors, options = latent_batch(contexts, [1, 1], device, heads=3)
        check(tensors, options, max_queries=1, splits=7, scratch=scratch)
    with pytest.raises(InputError, match=r"scratch is too small for 84 parts of rows; use make_latent_scratch"):
        attend_latents(
            *tensors, **options, max_queries=1, splits=7, scratch=LatentScratch.allocate(tensors[0].device, 83, 40)
        )


@pytest.mark.parametrize("splits", [1, 3])
def test_padding_in_front_of_a_graphs_sequence(splits: int, device: str) -> None:
    """It stands at negative positions and sees nothing; what comes out are numbers."""
    tensors, options = latent_batch([1, 40], [1, 1], device, heads=16)
    q, turned = (one[:2].repeat_interleave(4, dim=0) for one in tensors[:2])
    starts = torch.tensor([0, 4, 8], dtype=torch.int32, device=device)
    found = attend_latents(q, turned, *tensors[2:5], starts, **options, max_queries=4, splits=splits)
    assert not found[:3].any()
    exact = reference.attend_latents(*tensors, **options)
    assert relative_error(found[[3, 7]], exact[:2]) < LARGEST_ERROR["float16"]


def test_what_is_refused(device: str) -> None:
    tensors, options = latent_batch([20], [2], device)
    q, turned, cache, table, contexts, starts = tensors
    wide, tree = torch.cat((q, q), dim=2), {"max_queries": 63, "ancestors": torch.ones(4, dtype=torch.long)}
    wrong: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
        r"40 . 23 numbers": ((q, turned[..., 1:], cache[..., 1:].contiguous(), table, contexts, starts), {}),
        "turned has shape": ((q, turned[:, :4], cache, table, contexts, starts), {}),
        "max_queries is 0": (tensors, {"max_queries": 0}),
        "scale is 0": (tensors, {"scale": 0.0}),
        "needs cache_scale": (tensors, {"cache_scale": torch.ones(1, device=device)}),
        "page_size is 8": ((q, turned, cache[:, :, :8].contiguous(), table, contexts, starts), {}),
        "cache has shape": ((wide, turned, cache, table, contexts, starts), {}),
        "cache is float32": ((q, turned, cache.float(), table, contexts, starts), {}),
        "query_starts has shape": ((q, turned, cache, table, contexts, starts[:1]), {}),
        "page_table is int64": ((q, turned, cache, table.long(), contexts, starts), {}),
        "must be from 1 to 62": (tensors, tree),
    }
    for words, (given, changes) in wrong.items():
        with pytest.raises(InputError, match=words):
            attend_latents(*given, **{"max_queries": 2} | options | changes)
