"""Paged attention of many new tokens, alone and beside sequences that decode: against its meaning in torch.

The Triton kernel, on every GPU; what a Hopper GPU would choose instead is tested in test_attention_hopper.py.
"""

from typing import Any

import pytest
import torch
import triton

from quantkit.kernels.attention.attend import attend, make_scratch
from quantkit.kernels.attention.batches import Batch, random_batch
from quantkit.kernels.attention.integer_codes import BY_NAME
from quantkit.kernels.attention.prefill import PrefillConfig, prefill_config
from quantkit.kernels.reference import attention as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error

pytestmark = pytest.mark.kernel

SMALL = PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)


def check(batch: Batch, launches: int | None = None, **overrides: Any) -> None:
    """Near the exact result, no worse than twice torch in the same dtype, the same bits in every launch, tickets back
    at zero. By default two launches on a GPU; the interpreter runs programs one by one."""
    q, keys = batch.tensors[0], batch.tensors[1]
    scratch = make_scratch(q.device, sequences=64, heads=q.shape[1], kv_heads=keys.shape[1], head_dim=q.shape[2])
    overrides = {"prefill": prefill_config(triton.next_power_of_2(q.shape[2]))} | overrides
    first, *others = (
        attend(*batch.tensors, **batch.options, max_queries=batch.max_queries, scratch=scratch, **overrides)
        for _ in range(launches or (2 if q.is_cuda else 1))
    )
    assert all(torch.equal(other, first) for other in others)
    assert not scratch.tickets.any()
    exact = reference.attend(*batch.tensors, **batch.options, dtype=torch.float64)
    rough = reference.attend(*batch.tensors, **batch.options, dtype=q.dtype)
    error = relative_error(first, exact)
    assert error < LARGEST_ERROR[str(q.dtype)[6:]]
    assert error <= 2 * relative_error(rough, exact)


CASES: dict[str, dict[str, Any]] = {
    "one prompt": {"contexts": [100], "new": [100]},
    "a chunk of a prompt": {"contexts": [150], "new": [60]},
    "prompts of one length": {"contexts": [50, 50, 50], "new": [50, 50, 50]},
    "prompts of odd lengths": {"contexts": [33, 90, 17], "new": [33, 90, 17]},
    "after a shared prefix": {"contexts": [96, 40], "new": [32, 24]},
    "prompts beside decoding": {"contexts": [100, 17, 60, 33], "new": [60, 1, 60, 1]},
    "prompts beside verification and padding": {"contexts": [100, 17, 0, 33, 60], "new": [60, 3, 0, 5, 1]},
    "group 1": {"contexts": [100, 20], "new": [80, 1], "group": 1, "kv_heads": 2},
    "group 7": {"contexts": [100, 20], "new": [40, 1], "group": 7},
    "group 8": {"contexts": [100, 20], "new": [40, 20], "group": 8},
    "dim 96": {"contexts": [60, 20], "new": [40, 1], "head_dim": 96},
    "dim 128": {"contexts": [60, 20], "new": [40, 1], "head_dim": 128},
    "dim 256": {"contexts": [60, 20], "new": [40, 1], "head_dim": 256},
    "pages of 32": {"contexts": [100, 20], "new": [40, 1], "page_size": 32},
    "pages of 128": {"contexts": [300, 20], "new": [40, 1], "page_size": 128},
    "window": {"contexts": [200, 20], "new": [90, 1], "window": 50},
    "window of one": {"contexts": [100, 40], "new": [90, 40], "window": 1},
    "window longer than contexts": {"contexts": [100, 20], "new": [40, 20], "window": 1000},
    "soft cap": {"contexts": [100, 20], "new": [40, 1], "soft_cap": 2.0},
    "fp8": {"contexts": [100, 20], "new": [40, 1], "cache_dtype": torch.float8_e4m3fn},
    "sinks": {"contexts": [100, 20], "new": [60, 1], "kv_heads": 2, "group": 3, "sinks": True, "window": 50},
    "sinks, fp8": {"contexts": [100], "new": [40], "cache_dtype": torch.float8_e4m3fn, "sinks": True},
}


INTEGERS: dict[str, dict[str, Any]] = {
    "prompts of odd lengths": {"contexts": [33, 90, 17], "new": [33, 90, 17]},
    "prompts beside decoding, group 7": {"contexts": [100, 17], "new": [60, 1], "group": 7},
    "dim 96": {"contexts": [60, 20], "new": [40, 1], "head_dim": 96, "kv_heads": 2},
    "dim 128, pages of 128": {"contexts": [300, 20], "new": [40, 1], "head_dim": 128, "page_size": 128},
    "dim 256": {"contexts": [60, 20], "new": [40, 1], "head_dim": 256},
    "window, sinks": {"contexts": [200], "new": [90], "window": 50, "sinks": True},
    "soft cap": {"contexts": [100, 20], "new": [40, 1], "soft_cap": 2.0},
}


@pytest.mark.parametrize("kind", BY_NAME)
@pytest.mark.parametrize("name", INTEGERS)
def test_caches_of_integers(name: str, kind: str, device: str) -> None:
    codes = BY_NAME[kind]
    batch = random_batch(**{"kv_heads": 1} | INTEGERS[name], cache_dtype=codes.dtype, device=device)
    padded_dim = triton.next_power_of_2(batch.tensors[0].shape[2])
    check(batch, prefill=prefill_config(padded_dim, bits=codes.bits))


@pytest.mark.parametrize("name", CASES)
def test_as_in_torch(name: str, device: str) -> None:
    options = {"kv_heads": 1} | CASES[name]
    check(random_batch(**options, device=device))
    if device == "cuda":  # the interpreter rounds bfloat16 towards zero
        check(random_batch(**options, dtype=torch.bfloat16, device=device))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("page_size", [16, 128])
def test_tiles_of_every_kind(page_size: int, window: int | None, device: str) -> None:
    """Small tiles, so that each sequence has tiles before, at and behind the edges of what its queries see."""
    batch = random_batch(
        [200, 90, 31], [100, 90, 17], window=window, kv_heads=1, head_dim=96, page_size=page_size, device=device
    )
    check(batch, launches=2 if page_size == 16 else None, prefill=SMALL)


@pytest.mark.parametrize("pages", [100, pytest.param(500, marks=pytest.mark.long)])
def test_hundreds_of_pages(pages: int, device: str) -> None:
    check(random_batch([16 * pages, 20], [20, 20], kv_heads=1, group=4, device=device))


def test_more_sequences_than_a_program_looks_at_once(device: str) -> None:
    count = 300
    new = [20 if number in (3, 299) else 0 for number in range(count)]
    q, *rest = random_batch([20] * count, new, kv_heads=1, group=4, device=device).tensors
    out = attend(q, *rest, scale=0.1, max_queries=20)
    assert relative_error(out, reference.attend(q, *rest, scale=0.1)) < LARGEST_ERROR["float16"]


def test_chunks_give_what_the_whole_prompt_gives(device: str) -> None:
    q, keys, values, table, _, _ = random_batch([90], [90], kv_heads=1, device=device).tensors

    def run(begin: int, end: int) -> torch.Tensor:
        lengths = torch.tensor([end], dtype=torch.int32, device=device)
        starts = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        return attend(q[begin:end], keys, values, table, lengths, starts, scale=0.125, max_queries=end - begin)

    whole = run(0, 90)
    chunks = torch.cat([run(0, 40), run(40, 80), run(80, 90)])
    assert relative_error(chunks, whole) < LARGEST_ERROR["float16"]


@pytest.mark.gpu
def test_graph_replays_with_other_lengths() -> None:
    """Captured with one batch, replayed with another of the same shapes: nothing of the first is baked in."""
    captured = random_batch([40, 30, 500, 0], [1, 20, 30, 0], device="cuda")
    played = random_batch([300, 0, 30, 210], [40, 0, 10, 1], device="cuda")
    tensors = [tensor.clone() for tensor in captured.tensors]
    pages = max(captured.tensors[1].shape[0], played.tensors[1].shape[0])
    tensors[1:3] = [torch.zeros(pages, *tensor.shape[1:], dtype=tensor.dtype, device="cuda") for tensor in tensors[1:3]]
    tensors[3] = torch.zeros(4, 40, dtype=torch.int32, device="cuda")
    for tensor, source in zip(tensors, captured.tensors, strict=True):
        tensor[tuple(slice(size) for size in source.shape)] = source
    scratch = make_scratch("cuda", sequences=4, heads=8, kv_heads=2, head_dim=64)
    attend(*tensors, **captured.options, max_queries=40, scratch=scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*tensors, **captured.options, max_queries=40, scratch=scratch)
    for tensor, source in zip(tensors, played.tensors, strict=True):
        tensor[tuple(slice(size) for size in source.shape)] = source
    for _ in range(2):
        graph.replay()
        exact = reference.attend(*played.tensors, **played.options, dtype=torch.float64)
        assert relative_error(out[: len(exact)], exact) < LARGEST_ERROR["float16"]


@pytest.mark.parametrize("padded_dim", [64, 128, 256])
def test_default_tiles_fit_shared_memory(padded_dim: int) -> None:
    """Those of all programs that share a multiprocessor, as far as its 65536 registers go."""
    config = prefill_config(padded_dim)
    programs = 65_536 // ((config.max_registers or 255) * 32 * config.num_warps)
    tiles = (config.block_m + 2 * config.block_n * config.num_stages) * padded_dim * 2
    assert programs * (tiles + 1024) <= 228 * 1024  # each takes 1 KiB more
