"""Attention of long pieces of prompts in expanded form: keys and values of every head are made of the latents first.

    attend_expanded(q, turned, cache, up, pieces, out, scale=...)

Layout   q [tokens, heads, plain], turned [tokens, heads, rope]: both parts of queries, any strides but the last
         cache as in `attend.py`, pieces as in `pieces.py`, which name the tokens of q and out that this call is for
         up [heads, plain + value, rank], contiguous: what makes a head's key and its value of a latent
         out [tokens, heads, value], contiguous; only rows of the pieces are written
Meaning  `reference.latent.attend_expanded`
Limits   `limits.py`; no trees

A new token that meets a key takes plain + rope + value products of a head, and in absorbed form 2 rank + rope: 320 and
1,088 in DeepSeek's models. Making keys and values of a context takes rank (plain + value) for each of its tokens, so
more than rank (plain + value) / (2 rank - plain - value) new tokens pay for it: 170 (`LatentSizes.most_absorbed`).

Contexts, shared prefixes and earlier chunks included, are gathered from their pages, and one matrix product makes keys
and values of them, for as many heads at a time as EXPANDED_BYTES hold. A kernel that made them itself would do so again
for every block of queries; with pieces of contexts instead of heads, sums would have to wait in float32. The key that
turns is the same for all heads and is not copied for each. Keys and values keep their own widths: the kernel of other
prompts (`attention/prefill.py`) would pad both to 256.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.attention.cache import EIGHT_BIT
from quantkit.kernels.attention.latent.expanded_kernel import attend_rows
from quantkit.kernels.attention.latent.limits import check_heads, check_latents
from quantkit.kernels.attention.latent.pieces import EXPANDED_BYTES, PromptPieces
from quantkit.kernels.card import NO_GPU, Card, card_of
from quantkit.kernels.checks import HALVES, check_contiguous, check_dtype, check_rows, check_same_device, check_shape

NAME = "attention of prompts over latents"
_SEQUENCES_AT_ONCE = 256  # that a program looks through to find its own


@dataclass(frozen=True)
class ExpandedConfig:
    """How the kernel is compiled: queries and keys of a tile, warps, stages of the pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 2


def expanded_config(widest: int, card: Card = NO_GPU) -> ExpandedConfig:
    """By the wider of keys and values, as a power of two. Where a warp holds its operands itself, tiles are smaller."""
    if card is not NO_GPU and not card.multiplies_from_shared:
        return ExpandedConfig(block_m=64, block_n=32, num_warps=4 if widest <= 128 else 8)
    return ExpandedConfig(block_m=128, block_n=64, num_warps=8)


def attend_expanded(
    q: Tensor,
    turned: Tensor,
    cache: Tensor,
    up: Tensor,
    pieces: PromptPieces,
    out: Tensor,
    *,
    scale: float,
    cache_scale: Tensor | None = None,
    config: ExpandedConfig | None = None,
    expanded_bytes: int = EXPANDED_BYTES,
) -> None:
    """Writes what the heads of new tokens attend to into `out`; see the top of this file."""
    _check(q, turned, cache, up, out, scale, cache_scale)
    heads = q.shape[1]
    width, rank = up.shape[1:]
    kept = _gather(cache, pieces.kv_slots, q.dtype)
    at_once = max(1, min(heads, expanded_bytes // (pieces.num_rows * width * q.dtype.itemsize)))
    for first in range(0, heads, at_once):
        some = slice(first, min(first + at_once, heads))
        expanded = kept[:, :rank] @ up[some].flatten(0, 1).t()
        _launch(q[:, some], turned[:, some], kept, expanded, pieces, out[:, some], scale, cache_scale, rank, config)


def _gather(cache: Tensor, kv_slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the cache, [rows, rank + rope]; those of 8 bits still lack their scale."""
    if cache.dtype == EIGHT_BIT:  # torch cannot index it
        return cache.view(torch.uint8).flatten(0, 2)[kv_slots].view(EIGHT_BIT).to(dtype)
    return cache.flatten(0, 2)[kv_slots]


def _launch(
    q: Tensor,
    turned: Tensor,
    kept: Tensor,
    expanded: Tensor,
    pieces: PromptPieces,
    out: Tensor,
    scale: float,
    cache_scale: Tensor | None,
    rank: int,
    config: ExpandedConfig | None,
) -> None:
    """For some of the heads."""
    _, heads, plain = q.shape
    rope, value = turned.shape[2], out.shape[2]
    padded_plain, padded_rope, padded_value = (max(16, triton.next_power_of_2(size)) for size in (plain, rope, value))
    way = config or expanded_config(max(padded_plain, padded_value), card_of(q.device))
    sequences = len(pieces.first_queries)
    slots = pieces.num_new // way.block_m + sequences  # see tiles.find_sequence
    attend_rows[(slots * heads,)](
        *(q, turned, out, expanded, kept, pieces.first_queries, pieces.new_starts, pieces.first_rows, cache_scale),
        *(float(scale), *q.stride()[:2], *turned.stride()[:2], *out.stride()[:2], expanded.stride(0), sequences, heads),
        PLAIN=plain,
        ROPE=rope,
        VALUE=value,
        RANK=rank,
        PADDED_PLAIN=padded_plain,
        PADDED_ROPE=padded_rope,
        PADDED_VALUE=padded_value,
        BLOCK_M=way.block_m,
        BLOCK_N=way.block_n,
        SEQUENCES_AT_ONCE=_SEQUENCES_AT_ONCE,
        num_warps=way.num_warps,
        num_stages=way.num_stages,
    )


def _check(
    q: Tensor, turned: Tensor, cache: Tensor, up: Tensor, out: Tensor, scale: float, cache_scale: Tensor | None
) -> None:
    check_dtype(NAME, "q", q, HALVES)
    check_shape(NAME, "q", q, (None, None, None))
    check_shape(NAME, "turned", turned, (*q.shape[:2], None))
    check_shape(NAME, "up", up, (q.shape[1], None, None))
    check_contiguous(NAME, "up", up)
    plain, rope, value, rank = q.shape[2], turned.shape[2], up.shape[1] - q.shape[2], up.shape[2]
    check_heads(NAME, plain, value)
    check_shape(NAME, "out", out, (*q.shape[:2], value))
    check_contiguous(NAME, "out", out)
    for name, tensor in (("q", q), ("turned", turned)):
        check_rows(NAME, name, tensor)
    for name, tensor in (("turned", turned), ("up", up), ("out", out)):
        check_dtype(NAME, name, tensor, (q.dtype,))
    check_dtype(NAME, "cache", cache, (q.dtype, EIGHT_BIT))
    check_shape(NAME, "cache", cache, (None, 1, None, rank + rope))
    check_contiguous(NAME, "cache", cache)
    check_latents(NAME, rank, rope, cache.shape[2])
    if (cache.dtype == EIGHT_BIT) != (cache_scale is not None):
        raise InputError(f"{NAME}: a cache of 8 bits needs cache_scale, and no other takes one")
    if not 0.0 < scale < 1e6:
        raise InputError(f"{NAME}: scale is {scale}, but must be positive")
    check_same_device(NAME, q=q, turned=turned, cache=cache, up=up, out=out, cache_scale=cache_scale)
