"""From the output of the fused qkv layer to attention's inputs, in one launch: norms of the heads, rope, cache writes.

Layout   qkv        [tokens, (heads + 2 * kv_heads) * head_dim], the heads of q, then k, then v; rows of any stride
         positions  [tokens]
         cos, sin   [max_positions, rotary_dim / 2] float32; the angle of pair i turns elements i and i + rotary_dim / 2
                    of a head (transformers' half-split order); elements from rotary_dim on stay as they are
         q_norm, k_norm  [head_dim], RMS norm of each head of q and k before rope; both or neither
         caches     [pages, kv_heads, page_size, head_dim], head_dim contiguous, both with the same strides
         slots      [tokens] int64, page * page_size + offset; a negative slot (padding) writes nothing
         key_centres  [kv_heads, head_dim] float32, taken from keys after rope, before they are rounded; None: nothing
         scales     [kv_heads] float32, one for a head of k or v; only for caches in float8_e4m3fn. Those of caches of
                    integers are their words, which are written: see `rotary_codes.py`
Returns  q [tokens, heads, head_dim], a tensor of its own: qkv is not changed
Meaning  `reference.elementwise.rotate_and_cache`. The norm rounds as in `norm.py`; rope is done in float32 and rounded
         once (transformers rounds cos, sin and both products to the model's dtype before the sum, which is less exact);
         8-bit caches hold the float32 result, less its centre, divided by its scale, rounded to nearest even, saturated
Limits   bfloat16, float16 or float32; caches in the same dtype, float8_e4m3fn or integers; head_dim 64, 96, 128 or 256.
         A position outside the tables takes their nearest row, a slot outside the caches is not written: checking
         either on the host would stall the GPU
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.attention.integer_codes import BY_DTYPE
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.checks import (
    HALVES,
    check_contiguous,
    check_dtype,
    check_limit,
    check_rows,
    check_same_device,
    check_shape,
)
from quantkit.kernels.rotary_codes import launch_rotate_codes

HEAD_DIMS = (64, 96, 128, 256)
_KERNEL = "rotate_and_cache"
_LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit
def _normed(part, inverse, weights_q, weights_k, at, is_query, here, PLUS_ONE: tl.constexpr, DTYPE: tl.constexpr):
    """A part of the heads, [heads, columns], normalised."""
    weight_q = tl.load(weights_q + at, mask=here, other=0.0).to(tl.float32)
    weight_k = tl.load(weights_k + at, mask=here, other=0.0).to(tl.float32)
    weight = tl.where(is_query, weight_q, weight_k)
    normal = part * inverse[:, None]
    if PLUS_ONE:
        return (normal * (1.0 + weight)).to(DTYPE).to(tl.float32)
    return (normal.to(DTYPE).to(tl.float32) * weight).to(DTYPE).to(tl.float32)


@triton.jit
def _stored(value, scales, kv_head, is_kv, DTYPE: tl.constexpr, SCALED: tl.constexpr):
    """What a cache of this dtype holds for a value."""
    if SCALED:
        scale = tl.load(scales + kv_head, mask=is_kv, other=1.0)[:, None]
        value = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
        value = tl.minimum(tl.maximum(value, -_LARGEST_E4M3), _LARGEST_E4M3)
    return value.to(DTYPE)


@triton.jit
def _write(
    part,
    at,
    here,
    head,
    token,
    slot_place,
    head_stride,
    writes,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    key_centres,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Columns `at` of every head to where they belong."""
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    place = queries + token * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + at
    tl.store(place, part.to(queries.dtype.element_ty), mask=is_query[:, None] & here)
    kv_head = tl.where(is_key, head - HEADS, head - HEADS - KV_HEADS)
    place = slot_place + kv_head[:, None] * head_stride + at
    key = part
    if CENTRED:
        key -= tl.load(key_centres + kv_head[:, None] * HEAD_DIM + at, mask=is_key[:, None] & here, other=0.0)
    key = _stored(key, key_scales, kv_head, is_key, keys.dtype.element_ty, SCALED)
    tl.store(keys + place, key, mask=is_key[:, None] & here & writes)
    value = _stored(part, value_scales, kv_head, is_value, values.dtype.element_ty, SCALED)
    tl.store(values + place, value, mask=is_value[:, None] & here & writes)


@triton.jit
def _rotate(
    qkv,
    positions,
    cosines,
    sines,
    q_norm,
    k_norm,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    key_centres,
    slots,
    qkv_stride,
    page_stride,
    head_stride,
    offset_stride,
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
    SCALED: tl.constexpr,
    CENTRED: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_last(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    half: tl.constexpr = ROTARY_DIM // 2
    has_rest: tl.constexpr = ROTARY_DIM < HEAD_DIM
    dtype = qkv.dtype.element_ty
    column = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = column < half
    position = tl.minimum(tl.maximum(tl.load(positions + token).to(tl.int64), 0), max_positions - 1)
    slot = tl.load(slots + token)
    cosine = tl.load(cosines + position * half + column, mask=in_half, other=0.0)
    sine = tl.load(sines + position * half + column, mask=in_half, other=0.0)

    known = head[:, None] < HEADS + 2 * KV_HEADS
    row = qkv + token * qkv_stride + head[:, None] * HEAD_DIM
    first = tl.load(row + column, mask=known & in_half, other=0.0).to(tl.float32)
    second = tl.load(row + half + column, mask=known & in_half, other=0.0).to(tl.float32)
    turns = head[:, None] < HEADS + KV_HEADS  # q and k; v is only copied
    is_query = head[:, None] < HEADS
    if has_rest:
        beyond = tl.arange(0, REST_BLOCK)[None, :] + ROTARY_DIM
        in_rest = beyond < HEAD_DIM
        rest = tl.load(row + beyond, mask=known & in_rest, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if has_rest:
            square += tl.sum(rest * rest, axis=1)
        inverse = tl.rsqrt(square / HEAD_DIM + eps)
        normed = _normed(first, inverse, q_norm, k_norm, column, is_query, in_half, PLUS_ONE, dtype)
        first = tl.where(turns, normed, first)
        normed = _normed(second, inverse, q_norm, k_norm, column + half, is_query, in_half, PLUS_ONE, dtype)
        second = tl.where(turns, normed, second)
        if has_rest:
            normed = _normed(rest, inverse, q_norm, k_norm, beyond, is_query, in_rest, PLUS_ONE, dtype)
            rest = tl.where(turns, normed, rest)
    turned = tl.where(turns, first * cosine - second * sine, first)
    second = tl.where(turns, second * cosine + first * sine, second)
    first = turned

    writes = (slot >= 0) & (slot < num_slots)
    place = (slot // page_size) * page_stride + (slot % page_size) * offset_stride
    _write(
        first, column, in_half, head, token, place, head_stride, writes, queries, keys, values, key_scales,
        value_scales, key_centres, HEADS, KV_HEADS, HEAD_DIM, SCALED, CENTRED,
    )  # fmt: skip
    _write(
        second, column + half, in_half, head, token, place, head_stride, writes, queries, keys, values, key_scales,
        value_scales, key_centres, HEADS, KV_HEADS, HEAD_DIM, SCALED, CENTRED,
    )  # fmt: skip
    if has_rest:
        _write(
            rest, beyond, in_rest, head, token, place, head_stride, writes, queries, keys, values, key_scales,
            value_scales, key_centres, HEADS, KV_HEADS, HEAD_DIM, SCALED, CENTRED,
        )  # fmt: skip


def rotate_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    key_centres: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The rotated queries, [tokens, heads, head_dim]. Writes into the caches `keys` and `values`."""
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    pages, kv_heads, page_size, head_dim = _check_caches(keys, values, scales, qkv.dtype)
    _check_centres(key_centres, kv_heads, head_dim)
    _check_rows_of_tokens(qkv, positions, slots, (heads + 2 * kv_heads) * head_dim)
    _check_tables(cos, sin, head_dim)
    _check_norms(q_norm, k_norm, head_dim, qkv.dtype)
    tokens = qkv.shape[0]
    out = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device) if out is None else out
    check_dtype(_KERNEL, "out", out, (qkv.dtype,))
    check_shape(_KERNEL, "out", out, (tokens, heads, head_dim))
    check_contiguous(_KERNEL, "out", out)
    check_same_device(_KERNEL, qkv=qkv, positions=positions, cos=cos, sin=sin, slots=slots, out=out)
    check_same_device(
        _KERNEL, qkv=qkv, keys=keys, values=values, q_norm=q_norm, k_norm=k_norm, **scales, key_centres=key_centres
    )
    if tokens == 0:
        return out
    rotary_dim = 2 * cos.shape[1]
    # Few tokens: many small programs, one warp each. Many tokens: fewer, larger ones.
    group, warps = (4, 1) if tokens <= 64 else (16, 4)
    tensors = (qkv, positions, cos, sin, q_norm, k_norm, out, keys, values, *scales.values(), key_centres, slots)
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "NORM": q_norm is not None,
        "PLUS_ONE": plus_one,
        "CENTRED": key_centres is not None,
    }
    if keys.dtype in BY_DTYPE:
        launch_rotate_codes(tensors, (cos.shape[0], pages * page_size), eps, constants, group, warps)
        return out
    _rotate[(tokens, triton.cdiv(heads + 2 * kv_heads, group))](
        *tensors,
        qkv.stride(0),
        *keys.stride()[:3],
        cos.shape[0],
        pages * page_size,
        page_size,
        eps,
        **constants,
        SCALED=key_scales is not None,
        GROUP=group,
        HALF_BLOCK=triton.next_power_of_2(rotary_dim // 2),
        REST_BLOCK=triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
        num_warps=warps,
        **chained(qkv.device),
    )
    return out


def _check_caches(keys: Tensor, values: Tensor, scales: dict[str, Tensor | None], dtype: torch.dtype) -> torch.Size:
    check_shape(_KERNEL, "keys", keys, (None, None, None, None))
    codes = BY_DTYPE.get(keys.dtype)
    head_dim = keys.shape[3] if codes is None else keys.shape[3] * 8 // codes.bits
    check_limit(_KERNEL, "head_dim", head_dim, HEAD_DIMS)
    check_shape(_KERNEL, "values", values, keys.shape)
    check_rows(_KERNEL, "keys", keys)
    if keys.stride() != values.stride():
        raise InputError(f"{_KERNEL}: keys have strides {keys.stride()}, values {values.stride()}; must be the same")
    check_dtype(_KERNEL, "keys", keys, (dtype, torch.float8_e4m3fn, *BY_DTYPE))
    check_dtype(_KERNEL, "values", values, (keys.dtype,))
    for name, scale in scales.items():
        if (scale is None) != (keys.dtype == dtype):
            need = "must not have" if scale is not None else "need"
            raise InputError(f"{_KERNEL}: caches of {str(keys.dtype)[6:]} {need} {name}")
        if scale is not None and codes is not None:
            check_dtype(_KERNEL, name, scale, (codes.word,))
            check_shape(_KERNEL, name, scale, keys.shape[:3])
            check_rows(_KERNEL, name, scale)
        elif scale is not None:
            check_dtype(_KERNEL, name, scale, (torch.float32,))
            check_shape(_KERNEL, name, scale, (keys.shape[1],))
            check_contiguous(_KERNEL, name, scale)
    return torch.Size((*keys.shape[:3], head_dim))


def _check_centres(centres: Tensor | None, kv_heads: int, head_dim: int) -> None:
    if centres is not None:
        check_dtype(_KERNEL, "key_centres", centres, (torch.float32,))
        check_shape(_KERNEL, "key_centres", centres, (kv_heads, head_dim))
        check_contiguous(_KERNEL, "key_centres", centres)


def _check_rows_of_tokens(qkv: Tensor, positions: Tensor, slots: Tensor, width: int) -> None:
    check_dtype(_KERNEL, "qkv", qkv, (*HALVES, torch.float32))
    check_shape(_KERNEL, "qkv", qkv, (None, width))
    check_rows(_KERNEL, "qkv", qkv)
    check_dtype(_KERNEL, "positions", positions, (torch.int32, torch.int64))
    check_dtype(_KERNEL, "slots", slots, (torch.int64,))
    for name, tensor in (("positions", positions), ("slots", slots)):
        check_shape(_KERNEL, name, tensor, (qkv.shape[0],))
        check_contiguous(_KERNEL, name, tensor)


def _check_tables(cos: Tensor, sin: Tensor, head_dim: int) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        check_dtype(_KERNEL, name, table, (torch.float32,))
        check_shape(_KERNEL, name, table, (None, None) if name == "cos" else cos.shape)
        check_contiguous(_KERNEL, name, table)
    if not (cos.shape[0] >= 1 and 2 <= 2 * cos.shape[1] <= head_dim):
        raise InputError(
            f"{_KERNEL}: cos has shape {list(cos.shape)}, but must be [max_positions, rotary_dim / 2] with at least "
            f"one position and rotary_dim between 2 and head_dim = {head_dim}"
        )


def _check_norms(q_norm: Tensor | None, k_norm: Tensor | None, head_dim: int, dtype: torch.dtype) -> None:
    if (q_norm is None) != (k_norm is None):
        raise InputError(f"{_KERNEL}: q_norm and k_norm must be given together or not at all")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_dtype(_KERNEL, name, weight, (dtype,))
            check_shape(_KERNEL, name, weight, (head_dim,))
            check_contiguous(_KERNEL, name, weight)
