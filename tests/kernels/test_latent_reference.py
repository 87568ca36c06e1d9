"""Latent attention over a paged cache of latents, against keys and values that are made of them head by head."""

import pytest
import torch
from torch import Tensor

from quantkit.kernels.attention.latent.pieces import PIECE_ROWS, group_sequences, make_pieces
from quantkit.kernels.reference.attention import attend_one
from quantkit.kernels.reference.elementwise import store
from quantkit.kernels.reference.latent import (
    attend_expanded,
    attend_latents,
    into_latents,
    out_of_latents,
    rotate_latent,
)

HEADS, RANK, PLAIN, ROPE, VALUE = 3, 10, 7, 4, 5
SCALE = 0.37


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expanded(q: Tensor, kept: Tensor, key_up: Tensor, value_up: Tensor, ancestors: Tensor | None = None) -> Tensor:
    """q [new, heads, plain + rope] over kept [context, rank + rope], by keys and values: [new, heads, value]."""
    latents, turned = kept[:, :RANK], kept[:, None, RANK:].expand(-1, HEADS, -1)
    keys = torch.cat((torch.einsum("kr,hpr->khp", latents, key_up), turned), dim=-1)
    values = torch.einsum("kr,hvr->khv", latents, value_up)
    wide = torch.nn.functional.pad(values, (0, PLAIN + ROPE - VALUE))
    found = attend_one(q, keys, wide, scale=SCALE, window=None, soft_cap=None, ancestors=ancestors)
    return found[..., :VALUE]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kept_dtype", [torch.float32, torch.float8_e4m3fn])
def test_as_with_keys_and_values(page_size: int, kept_dtype: torch.dtype) -> None:
    """Sequences of other lengths, pages in any order, one with nothing new, tokens of nobody at the end."""
    new, contexts = (3, 1, 0, 6), (9, 5, 4, 6)
    key_up, value_up = random(HEADS, PLAIN, RANK), random(HEADS, VALUE, RANK, seed=1)
    q = random(sum(new) + 2, HEADS, PLAIN + ROPE, seed=2)
    pages_each = 16 // page_size
    table = torch.randperm(4 * pages_each, generator=torch.Generator().manual_seed(3)).view(4, -1).int() + 1
    cache = torch.zeros(4 * pages_each + 1, 1, page_size, RANK + ROPE).to(kept_dtype)
    scales = None if kept_dtype == torch.float32 else torch.tensor([0.5])
    everything = [random(context, RANK + ROPE, seed=4 + context) for context in contexts]
    for row, kept in enumerate(everything):
        at = torch.arange(len(kept))
        store(kept[:, None], table[row, at // page_size].long() * page_size + at % page_size, cache, scales)
        if scales is not None:
            kept.copy_((kept / 0.5).to(kept_dtype).float() * 0.5)
    starts = torch.tensor((0, 3, 4, 4, 10)).int()
    attended = attend_latents(
        into_latents(q[..., :PLAIN], key_up), q[..., PLAIN:], cache, table, torch.tensor(contexts).int(), starts,
        scale=SCALE, cache_scale=scales,
    )  # fmt: skip
    found = out_of_latents(attended, value_up)
    for row in range(4):
        own = slice(int(starts[row]), int(starts[row + 1]))
        torch.testing.assert_close(found[own], expanded(q[own], everything[row], key_up, value_up), rtol=0, atol=1e-5)
    assert not found[sum(new) :].any()


def test_trees_see_their_ancestors_only() -> None:
    key_up, value_up, q, kept = random(HEADS, PLAIN, RANK), random(HEADS, VALUE, RANK), random(3, 3, 11), random(8, 14)
    ancestors = torch.tensor([0b001, 0b011, 0b101])
    cache = kept.view(1, 1, 8, 14)
    attended = attend_latents(
        into_latents(q[..., :PLAIN], key_up), q[..., PLAIN:], cache, torch.tensor([[0]]), torch.tensor([8]),
        torch.tensor([0, 3]), scale=SCALE, ancestors=ancestors,
    )  # fmt: skip
    wanted = expanded(q, kept, key_up, value_up, ancestors)
    torch.testing.assert_close(out_of_latents(attended, value_up), wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(wanted, expanded(q, kept, key_up, value_up), atol=1e-3)


@pytest.mark.parametrize("interleaved", [True, False])
def test_turning_is_multiplying_by_complex_numbers(interleaved: bool) -> None:
    tokens, half = 5, ROPE // 2
    angles, norm = random(9, half), random(RANK, seed=7)
    q, kept, positions = random(tokens, HEADS, ROPE), random(tokens, RANK + ROPE), torch.tensor([3, 0, 8, 8, 1])
    slots, cache = torch.tensor([6, -1, 0, 3, 7]), torch.zeros(2, 1, 4, RANK + ROPE)
    found = rotate_latent(
        q, kept, norm, positions, angles.cos(), angles.sin(), slots, cache, eps=0.1, interleaved=interleaved
    )

    def turned(x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).transpose(-1, -2)
        spin = torch.polar(torch.ones(tokens, half), angles[positions])
        both = torch.view_as_real(
            torch.view_as_complex(pairs.contiguous()) * spin.view(tokens, *[1] * (x.dim() - 2), half)
        )
        return both.transpose(-1, -2).flatten(-2)

    torch.testing.assert_close(found, turned(q))
    normed = torch.nn.functional.rms_norm(kept[:, :RANK], (RANK,), norm, 0.1)
    rows = torch.cat((normed, turned(kept[:, RANK:])), -1)
    stored = cache.view(8, -1)
    torch.testing.assert_close(stored[[6, 0, 3, 7]], rows[[0, 2, 3, 4]])
    assert not stored[[1, 2, 4, 5]].any()  # a token without a slot is kept nowhere


def test_pieces_of_prompts_in_expanded_form() -> None:
    """As in absorbed form: of three sequences the last two, the first of which has most of its context already."""
    starts, contexts = [0, 1, 4, 10], [5, 9, 6]
    up, q = random(HEADS, PLAIN + VALUE, RANK), random(10, HEADS, PLAIN + ROPE, seed=1)
    cache, table = random(9, 1, 4, RANK + ROPE, seed=2), torch.randperm(9).view(3, 3).int()
    pieces = make_pieces([1, 2], starts, contexts, table, 4)
    assert (pieces.num_new, pieces.num_rows) == (9, 15)
    out = torch.full((10, HEADS, VALUE), 7.0)
    plain, turned = q.split((PLAIN, ROPE), dim=2)
    attend_expanded(plain, turned, cache, up, pieces, out, scale=SCALE)
    batch = (table, torch.tensor(contexts).int(), torch.tensor(starts).int())
    attended = attend_latents(into_latents(plain, up[:, :PLAIN]), turned, cache, *batch, scale=SCALE)
    torch.testing.assert_close(out[1:], out_of_latents(attended, up[:, PLAIN:])[1:], rtol=0, atol=1e-5)
    assert bool((out[0] == 7.0).all())


def test_contexts_that_are_expanded_together() -> None:
    contexts = [9, PIECE_ROWS - 10, 10, PIECE_ROWS + 5, 3, 4]
    assert group_sequences(contexts, range(6)) == [[0, 1], [2], [3], [4, 5]]
    assert group_sequences(contexts, [0, 2, 5]) == [[0, 2, 5]]
    assert group_sequences(contexts, []) == []
