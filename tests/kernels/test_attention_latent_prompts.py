"""Prompts over latents, keys and values made first: against the meaning in torch; what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.attention.batches import random_batch
from quantkit.kernels.attention.latent.expanded import ExpandedConfig, attend_expanded, expanded_config
from quantkit.kernels.attention.latent.pieces import (
    EXPANDED_BYTES,
    PIECE_ROWS,
    PromptPieces,
    make_pieces,
    scratch_bytes,
)
from quantkit.kernels.card import KNOWN
from quantkit.kernels.reference import latent as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error

pytestmark = pytest.mark.kernel

FP8 = torch.float8_e4m3fn
SMALL = ExpandedConfig(block_m=16, block_n=16, num_warps=4)


def prompt_batch(
    contexts: list[int],
    new: list[int],
    chosen: list[int],
    device: str,
    *,
    heads: int = 3,
    plain: int = 20,
    value: int = 24,
    kept: torch.dtype | None = None,
    page_size: int = 16,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What kernel and reference take for the `chosen` sequences, rank 40 and rope 24; NaN behind contexts."""
    batch = random_batch(
        contexts, new, kv_heads=1, group=heads, head_dim=64, page_size=page_size, device=device, cache_dtype=kept
    )
    q, cache, _, table, _, starts = batch.tensors
    random = torch.Generator().manual_seed(1)
    up = (torch.randn(heads, plain + value, 40, generator=random) / 6).to(device, q.dtype)
    pieces = make_pieces(chosen, starts.tolist(), contexts, table, page_size)
    options: dict[str, Any] = {"scale": 0.2}
    if kept is not None:
        options["cache_scale"] = batch.options["k_scale"]
    return (q[..., :plain], q[..., 40:], cache, up, pieces), options


def run_problem(tensors: tuple[Any, ...], options: dict[str, Any], **how: Any) -> Tensor:
    """Kernel and meaning agree on the pieces, and leave other tokens alone. Returns the kernel's."""
    q, _, _, up, pieces = tensors
    outputs = [torch.full((*q.shape[:2], up.shape[1] - q.shape[2]), 9.0, dtype=q.dtype, device=q.device) for _ in "12"]
    attend_expanded(*tensors, outputs[0], **options, **{"config": SMALL} | how)
    reference.attend_expanded(*tensors, outputs[1], **options)
    touched = torch.zeros(len(q), dtype=torch.bool)
    for first, count in zip(pieces.first_queries.tolist(), pieces.new_starts.diff().tolist(), strict=True):
        touched[first : first + count] = True
    found, exact = (out.cpu()[touched] for out in outputs)
    assert relative_error(found, exact) < LARGEST_ERROR["float16"]
    assert bool((outputs[0].cpu()[~touched] == 9.0).all())
    return found


CASES: dict[str, tuple[list[int], list[int], list[int], dict[str, Any]]] = {
    "whole prompts": ([33, 7, 40], [33, 7, 40], [0, 1, 2], {}),
    "a chunk after others": ([90], [20], [0], {}),
    "a single token": ([1], [1], [0], {"heads": 1}),
    "one new token": ([50], [1], [0], {}),
    "between answers": ([30, 70, 20, 45, 9], [1, 33, 1, 17, 1], [1, 3], {}),
    "as many as tiles": ([32, 48], [32, 16], [0, 1], {}),
    "widths of powers of two": ([35], [20], [0], {"plain": 32, "value": 16}),
    "pages of 64": ([100, 65], [30, 65], [0, 1], {"page_size": 64}),
    "8 bits": ([40, 20], [25, 20], [0, 1], {"kept": FP8}),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_torch(name: str, device: str) -> None:
    contexts, new, chosen, more = CASES[name]
    run_problem(*prompt_batch(contexts, new, chosen, device, **more))


def test_heads_in_groups_give_the_same_bits(device: str) -> None:
    """Where the memory for keys and values holds few of them."""
    tensors, options = prompt_batch([24, 18], [10, 18], [0, 1], device)
    all_at_once = run_problem(tensors, options)
    of_a_head = 42 * 44 * 2
    for limit in (2 * of_a_head, 1):
        assert torch.equal(run_problem(tensors, options, expanded_bytes=limit), all_at_once)


def test_the_default_tiles(device: str) -> None:
    tensors, options = prompt_batch([150], [140], [0], device, heads=2)
    run_problem(tensors, options, config=None)
    assert {expanded_config(128, card).block_m for card in KNOWN.values()} == {64, 128}


def test_scratch_is_bounded() -> None:
    """Of DeepSeek-V3 with its longest context: rows of all, keys and values of a few heads."""
    rows, of_row = 163_840, 576 * 3 + 48
    assert scratch_bytes(256, 576, 2, rows) == rows * of_row + EXPANDED_BYTES
    assert scratch_bytes(256, 576, 2, 10) == PIECE_ROWS * of_row + EXPANDED_BYTES
    assert scratch_bytes(256, 576, 2, 10**6) == 10**6 * (of_row + 512)


def test_what_is_refused(device: str) -> None:
    (q, turned, cache, up, pieces), options = prompt_batch([20], [20], [0], device)
    out = torch.empty(20, 3, 24, dtype=q.dtype, device=device)
    wrong: dict[str, tuple[tuple[Tensor | PromptPieces, ...], dict[str, Any]]] = {
        "q is float32": ((q.float(), turned, cache, up, pieces, out), {}),
        "turned has shape": ((q, turned[:5], cache, up, pieces, out), {}),
        "up must be contiguous": ((q, turned, cache, up.transpose(1, 2).contiguous().transpose(1, 2), pieces, out), {}),
        "out has shape": ((q, turned, cache, up, pieces, out[:, :, 1:]), {}),
        "cache has shape": ((q, turned[..., :8], cache, up, pieces, out), {}),
        "heads have values of 0": ((q, turned, cache, up[:, :20].contiguous(), pieces, out), {}),
        "needs cache_scale": ((q, turned, cache, up, pieces, out), {"cache_scale": torch.ones(1, device=device)}),
        "scale is 0": ((q, turned, cache, up, pieces, out), {"scale": 0.0}),
    }
    for words, (given, changes) in wrong.items():
        with pytest.raises(InputError, match=words):
            attend_expanded(*given, **options | changes)
