"""From the first linear of latent attention to attention's inputs, in one launch: norm of latents, rope, cache writes.

Layout   q       [tokens, heads, rope], the part of queries that turns; strides of any size but the last
         kept    [tokens, rank + rope], rows of any stride: a latent, then the key of all heads, which turns
         norm    [rank], weight of the latents' RMS norm
         positions, slots, cos, sin as in `rotary.py`; angle i turns numbers 2 i and 2 i + 1 where `interleaved`, else
                 numbers i and i + rope / 2. Either way they come out as halves behind each other
         cache   [pages, 1, page_size, rank + rope], contiguous, in q's dtype, or float8_e4m3fn with scales [1] float32
Returns  the turned queries [tokens, heads, rope], a tensor of their own
Meaning  `reference.latent.rotate_latent`; rounding as in `norm.py` and `rotary.py`
Limits   bfloat16, float16 or float32; `limits.py`

One program keeps a token, others turn 16 heads each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.attention.latent.limits import check_latents
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.checks import HALVES, check_contiguous, check_dtype, check_rows, check_same_device, check_shape

_NAME = "rotate_latent"
_HEADS = 16  # that a program turns
_LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit
def _turn(rows, mask, position, cosines, sines, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both halves of what the pairs at `rows` [n, 1] become, float32 [n, PADDED]."""
    column = tl.arange(0, PADDED)[None, :]
    here = column < HALF
    cosine = tl.load(cosines + position * HALF + column, mask=here, other=0.0)
    sine = tl.load(sines + position * HALF + column, mask=here, other=0.0)
    first_at = 2 * column if INTERLEAVED else column
    second_at = 2 * column + 1 if INTERLEAVED else HALF + column
    first = tl.load(rows + first_at, mask=mask & here, other=0.0).to(tl.float32)
    second = tl.load(rows + second_at, mask=mask & here, other=0.0).to(tl.float32)
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def _keep(place, value, mask, scales):
    """Stores what the cache holds for a value."""
    if scales is not None:
        scale = tl.load(scales)
        value = tl.div_rn(value, tl.zeros_like(value) + scale)
        value = tl.minimum(tl.maximum(value, -_LARGEST_E4M3), _LARGEST_E4M3)
    tl.store(place, value.to(place.dtype.element_ty), mask=mask)


@triton.jit
def _keep_token(
    row,
    norm,
    position,
    cosines,
    sines,
    slot,
    num_slots,
    cache,
    scales,
    eps,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """A latent, normed, and its key, turned, into their slot."""
    columns = tl.arange(0, PADDED_RANK)
    inside = columns < RANK
    weight = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    latent = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = row.dtype.element_ty
    normal = (latent * tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + eps)).to(dtype)
    latent = (normal.to(tl.float32) * weight).to(dtype).to(tl.float32)
    half = tl.arange(0, PADDED_HALF)[None, :]
    key = row + RANK + tl.zeros([1, 1], tl.int32)
    first, second = _turn(key, half < HALF, position, cosines, sines, HALF, PADDED_HALF, INTERLEAVED)
    writes = (slot >= 0) & (slot < num_slots)
    place = cache + slot * (RANK + 2 * HALF)
    _keep(place + columns, latent, inside & writes, scales)
    _keep(place + RANK + half, first, (half < HALF) & writes, scales)
    _keep(place + RANK + HALF + half, second, (half < HALF) & writes, scales)


@triton.jit(do_not_specialize=["max_positions"])
def rotate_rows(
    q,
    kept,
    norm,
    positions,
    cosines,
    sines,
    slots,
    cache,
    scales,
    turned,
    q_token,
    q_head,
    kept_token,
    max_positions,
    num_slots,
    eps,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUP: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_last(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    position = tl.minimum(tl.maximum(tl.load(positions + token).to(tl.int64), 0), max_positions - 1)
    if tl.program_id(1) == 0:
        row, slot = kept + token * kept_token, tl.load(slots + token)
        _keep_token(
            row, norm, position, cosines, sines, slot, num_slots, cache, scales, eps,
            RANK, PADDED_RANK, HALF, PADDED_HALF, INTERLEAVED,
        )  # fmt: skip
    else:
        head = ((tl.program_id(1) - 1) * GROUP + tl.arange(0, GROUP))[:, None]
        known, half = head < HEADS, tl.arange(0, PADDED_HALF)[None, :]
        heads = q + token * q_token + head * q_head
        first, second = _turn(heads, known, position, cosines, sines, HALF, PADDED_HALF, INTERLEAVED)
        place = turned + (token * HEADS + head) * (2 * HALF) + half
        tl.store(place, first.to(turned.dtype.element_ty), mask=known & (half < HALF))
        tl.store(place + HALF, second.to(turned.dtype.element_ty), mask=known & (half < HALF))


def rotate_latent(
    q: Tensor,
    kept: Tensor,
    norm: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    eps: float,
    interleaved: bool,
    scales: Tensor | None = None,
) -> Tensor:
    """The turned queries. Writes into the cache; see the top of this file."""
    _check_tokens(q, kept, norm, positions, slots)
    _check_cache(q, norm, cos, sin, cache, scales)
    check_same_device(_NAME, q=q, kept=kept, norm=norm, positions=positions, cos=cos, sin=sin, slots=slots, cache=cache)
    tokens, heads, rope = q.shape
    turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return turned
    rank, half = norm.shape[0], rope // 2
    rotate_rows[(tokens, 1 + triton.cdiv(heads, _HEADS))](
        *(q, kept, norm, positions, cos, sin, slots, cache, scales, turned),
        *(*q.stride()[:2], kept.stride(0), cos.shape[0], cache.shape[0] * cache.shape[2], eps),
        HEADS=heads,
        RANK=rank,
        PADDED_RANK=triton.next_power_of_2(rank),
        HALF=half,
        PADDED_HALF=triton.next_power_of_2(half),
        INTERLEAVED=interleaved,
        GROUP=_HEADS,
        num_warps=4,
        **chained(q.device),
    )
    return turned


def _check_tokens(q: Tensor, kept: Tensor, norm: Tensor, positions: Tensor, slots: Tensor) -> None:
    check_dtype(_NAME, "q", q, (*HALVES, torch.float32))
    check_shape(_NAME, "q", q, (None, None, None))
    check_rows(_NAME, "q", q)
    tokens, _, rope = q.shape
    check_shape(_NAME, "norm", norm, (None,))
    check_contiguous(_NAME, "norm", norm)
    check_shape(_NAME, "kept", kept, (tokens, norm.shape[0] + rope))
    check_rows(_NAME, "kept", kept)
    for name, tensor in (("kept", kept), ("norm", norm)):
        check_dtype(_NAME, name, tensor, (q.dtype,))
    check_dtype(_NAME, "positions", positions, (torch.int32, torch.int64))
    check_dtype(_NAME, "slots", slots, (torch.int64,))
    for name, tensor in (("positions", positions), ("slots", slots)):
        check_shape(_NAME, name, tensor, (tokens,))
        check_contiguous(_NAME, name, tensor)


def _check_cache(q: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, scales: Tensor | None) -> None:
    rope = q.shape[2]
    for name, table in (("cos", cos), ("sin", sin)):
        check_dtype(_NAME, name, table, (torch.float32,))
        check_shape(_NAME, name, table, (cos.shape[0], rope // 2))
        check_contiguous(_NAME, name, table)
    check_shape(_NAME, "cache", cache, (None, 1, None, norm.shape[0] + rope))
    check_contiguous(_NAME, "cache", cache)
    check_latents(_NAME, norm.shape[0], rope, cache.shape[2])
    check_dtype(_NAME, "cache", cache, (q.dtype, torch.float8_e4m3fn))
    if (cache.dtype == q.dtype) != (scales is None):
        raise InputError(f"{_NAME}: a cache of 8 bits needs scales, and no other takes them")
    if scales is not None:
        check_dtype(_NAME, "scales", scales, (torch.float32,))
        check_shape(_NAME, "scales", scales, (1,))
        check_same_device(_NAME, q=q, scales=scales)
