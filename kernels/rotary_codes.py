"""`rotary.py` for caches of integers: the same norms and rope, then heads of keys and values are rounded.

Layout   as `rotary.py`; the caches are codes, and scales their words, as `attention/integer_codes.py` has them
Meaning  `reference.elementwise.rotate_and_cache`; the rotation before 4 bits adds in another order
Limits   those of `rotary.py`

A program has some heads of one token, each as two halves: those are what a byte of two codes is made of, and Hadamard's
matrix begins with their sum and difference. An element is read twice, for itself and for the one it turns with.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.attention.integer_codes import BY_DTYPE, CUTS, LARGEST_SCALE, SMALLEST_SCALE
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.reference.integer_codes import block_of

_LARGEST_SCALE = tl.constexpr(LARGEST_SCALE)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_CUT = tl.constexpr(CUTS[3][0])  # the others are with and without it at either end
_LARGEST_HALF = tl.constexpr(65504.0)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to a whole number, to nearest even


@triton.jit
def _normed(x, inverse, weights_q, weights_k, at, is_query, here, PLUS_ONE: tl.constexpr, DTYPE: tl.constexpr):
    """Elements `at` of the heads, normalised, as in `rotary.py`."""
    weight_q = tl.load(weights_q + at, mask=here, other=0.0).to(tl.float32)
    weight_k = tl.load(weights_k + at, mask=here, other=0.0).to(tl.float32)
    weight = tl.where(is_query, weight_q, weight_k)
    normal = x * inverse
    if PLUS_ONE:
        return (normal * (1.0 + weight)).to(DTYPE).to(tl.float32)
    return (normal.to(DTYPE).to(tl.float32) * weight).to(DTYPE).to(tl.float32)


@triton.jit
def _turned(
    row,
    at,
    here,
    known,
    turns,
    is_query,
    inverse,
    q_norm,
    k_norm,
    cosines,
    sines,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """Elements `at` [1, columns] of the heads after norm and rope, float32 [heads, columns]."""
    half: tl.constexpr = ROTARY_DIM // 2
    dtype = row.dtype.element_ty
    moves = here & (at < ROTARY_DIM)
    partner = tl.where(at < half, at + half, at - half)
    own = tl.load(row + at, mask=known & here, other=0.0).to(tl.float32)
    other = tl.load(row + partner, mask=known & moves, other=0.0).to(tl.float32)
    if NORM:
        own = tl.where(turns, _normed(own, inverse, q_norm, k_norm, at, is_query, here, PLUS_ONE, dtype), own)
        other = _normed(other, inverse, q_norm, k_norm, partner, is_query, moves, PLUS_ONE, dtype)
    angle = tl.where(at < half, at, at - half)
    cosine = tl.load(cosines + angle, mask=moves, other=1.0)
    sine = tl.load(sines + angle, mask=moves, other=0.0)
    turned = own * cosine + other * tl.where(at < half, -sine, sine)
    return tl.where(turns & moves, turned, own)


@triton.jit
def _blocks_rotated(x, GROUP: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Hadamard's matrix, not yet normalised, times every block of SIZE = 2**STEPS columns of x [GROUP, COLUMNS].

    A step adds and subtracts neighbours and puts sums before differences; after STEPS of them all are in their places.
    """
    blocks: tl.constexpr = COLUMNS // SIZE
    for _ in tl.static_range(STEPS):
        left, right = tl.split(tl.reshape(x, (GROUP, blocks, SIZE // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 1, 3, 2)), (GROUP, COLUMNS))
    return x


@triton.jit
def _rounded(x):
    return (x + _ROUNDER) - _ROUNDER


@triton.jit
def _tried(x, here, lowest, width, below, above):
    """Scale and middle of a range whose ends lose these shares, codes -8 to 7, and their squared errors."""
    scale = tl.minimum(tl.maximum(width * ((1.0 - below - above) / 15.0), _SMALLEST_SCALE), _LARGEST_SCALE)
    scale = scale.to(tl.float16)
    step = tl.broadcast_to(scale.to(tl.float32)[:, None], x.shape)
    middle = lowest + width * below + 8.0 * scale.to(tl.float32)
    middle = tl.minimum(tl.maximum(middle, -_LARGEST_HALF), _LARGEST_HALF).to(tl.float16)
    centre = middle.to(tl.float32)[:, None]
    codes = tl.minimum(tl.maximum(_rounded(tl.div_rn(x - centre, step)), -8.0), 7.0)
    wrong = tl.where(here, codes * step + centre - x, 0.0)
    return scale, middle, codes, tl.sum(wrong * wrong, axis=1)


@triton.jit
def _half_codes(x, here):
    """Codes (0 to 15) of half a head [heads, columns], and its scale and middle as bits of float16 [heads]."""
    lowest = tl.min(tl.where(here, x, float("inf")), axis=1)
    width = tl.max(tl.where(here, x, float("-inf")), axis=1) - lowest
    scale, middle, codes, least = _tried(x, here, lowest, width, 0.0, 0.0)
    for cut in tl.static_range(1, 4):
        below, above = _CUT * (cut & 1), _CUT * (cut >> 1)
        other_scale, other_middle, other_codes, error = _tried(x, here, lowest, width, below, above)
        better = error < least
        least = tl.minimum(error, least)
        scale = tl.where(better, other_scale, scale)
        middle = tl.where(better, other_middle, middle)
        codes = tl.where(better[:, None], other_codes, codes)
    bits = (scale.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF) | (
        (middle.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF) << 16
    )
    return (codes + 8.0).to(tl.int32), bits


@triton.jit
def _rotate_codes(
    qkv,
    positions,
    cosines,
    sines,
    q_norm,
    k_norm,
    queries,
    keys,
    values,
    key_words,
    value_words,
    key_centres,
    slots,
    qkv_stride,
    page_stride,
    head_stride,
    page_words,
    head_words,
    max_positions,
    num_slots,
    page_size,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    CENTRED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    STEPS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_last(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    half: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, COLUMNS)[None, :]
    here = column < half
    position = tl.minimum(tl.maximum(tl.load(positions + token).to(tl.int64), 0), max_positions - 1)
    slot = tl.load(slots + token)
    cosines += position * (ROTARY_DIM // 2)
    sines += position * (ROTARY_DIM // 2)

    known = head[:, None] < HEADS + 2 * KV_HEADS
    row = qkv + token * qkv_stride + head[:, None] * HEAD_DIM
    turns = head[:, None] < HEADS + KV_HEADS  # q and k
    is_query = head[:, None] < HEADS
    inverse = 1.0
    if NORM:
        low = tl.load(row + column, mask=known & here, other=0.0).to(tl.float32)
        high = tl.load(row + half + column, mask=known & here, other=0.0).to(tl.float32)
        square = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        inverse = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
    low = _turned(
        row, column, here, known, turns, is_query, inverse, q_norm, k_norm, cosines, sines, ROTARY_DIM, NORM, PLUS_ONE
    )
    high = _turned(
        row, half + column, here, known, turns, is_query, inverse, q_norm, k_norm, cosines, sines, ROTARY_DIM, NORM,
        PLUS_ONE,
    )  # fmt: skip
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    kv_head = tl.where(head < HEADS + KV_HEADS, head - HEADS, head - HEADS - KV_HEADS)
    if CENTRED:
        place = key_centres + kv_head[:, None] * HEAD_DIM + column
        low -= tl.load(place, mask=is_key[:, None] & here, other=0.0)
        high -= tl.load(place + half, mask=is_key[:, None] & here, other=0.0)
    if BITS == 4:
        factor = tl.rsqrt(tl.full([1, 1], 2.0 * SIZE, tl.float32))
        added = _blocks_rotated(low + high, GROUP, COLUMNS, SIZE, STEPS) * factor
        taken = _blocks_rotated(low - high, GROUP, COLUMNS, SIZE, STEPS) * factor
        low = tl.where(turns, added, low)
        high = tl.where(turns, taken, high)

    place = queries + token * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + column
    tl.store(place, low.to(queries.dtype.element_ty), mask=is_query & here)
    tl.store(place + half, high.to(queries.dtype.element_ty), mask=is_query & here)

    writes = (slot >= 0) & (slot < num_slots)
    page, offset = slot // page_size, slot % page_size
    is_key = is_key & writes
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS) & writes
    width: tl.constexpr = HEAD_DIM * BITS // 8
    place = page * page_stride + kv_head[:, None] * head_stride + offset * width + column
    word_place = page * page_words + kv_head * head_words + offset
    if BITS == 4:
        low_codes, words = _half_codes(low, here)
        high_codes, high_words = _half_codes(high, here)
        codes = (low_codes | (high_codes << 4)).to(tl.uint8)
        words = words | (high_words << 32)
        tl.store(keys + place, codes, mask=is_key[:, None] & here)
        tl.store(values + place, codes, mask=is_value[:, None] & here)
    else:
        largest = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
        words = tl.minimum(tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)), _LARGEST_SCALE)
        scale = tl.broadcast_to(tl.where(words > 0.0, words, 1.0)[:, None], low.shape)
        low = tl.minimum(tl.maximum(_rounded(tl.div_rn(low, scale)), -127.0), 127.0).to(tl.int8)
        high = tl.minimum(tl.maximum(_rounded(tl.div_rn(high, scale)), -127.0), 127.0).to(tl.int8)
        tl.store(keys + place, low, mask=is_key[:, None] & here)
        tl.store(keys + place + half, high, mask=is_key[:, None] & here)
        tl.store(values + place, low, mask=is_value[:, None] & here)
        tl.store(values + place + half, high, mask=is_value[:, None] & here)
    tl.store(key_words + word_place, words, mask=is_key)
    tl.store(value_words + word_place, words, mask=is_value)


def launch_rotate_codes(
    tensors: tuple[Tensor | None, ...],
    limits: tuple[int, int],
    eps: float,
    constants: dict[str, Any],
    group: int,
    warps: int,
) -> None:
    """Launches what `rotate_and_cache` has checked; `tensors` are the kernel's arguments in their order, `limits` the
    positions of the tables and the slots of the caches."""
    qkv, keys, words = tensors[0], tensors[7], tensors[9]
    assert qkv is not None and keys is not None and words is not None  # noqa: PT018
    head_dim, size = constants["HEAD_DIM"], block_of(constants["HEAD_DIM"])
    _rotate_codes[(qkv.shape[0], triton.cdiv(constants["HEADS"] + 2 * constants["KV_HEADS"], group))](
        *tensors,
        qkv.stride(0),
        *keys.stride()[:2],
        *words.stride()[:2],
        *limits,
        keys.shape[2],
        eps,
        **constants,
        BITS=BY_DTYPE[keys.dtype].bits,
        GROUP=group,
        COLUMNS=triton.next_power_of_2(head_dim // 2),
        SIZE=size,
        STEPS=size.bit_length() - 1,
        num_warps=warps,
        **chained(qkv.device),
    )
