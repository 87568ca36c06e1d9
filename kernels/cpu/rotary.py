"""From a layer's qkv to attention's inputs on a CPU: norms of heads, rope, and keys and values into their pages.

Meaning as `reference.elementwise.rotate_and_cache` has it; caches of 8 bits or fewer are left to it.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.floats import BYTES, load_floats, rounded, store_floats
from quantkit.kernels.cpu.language import F32, I64, Code, Value
from quantkit.kernels.cpu.norm import inverse_of_rms, weighted
from quantkit.kernels.cpu.pool import shared_pool
from quantkit.kernels.cpu.rows import along, as_argument, load_argument, load_integers
from quantkit.kernels.reference import elementwise


class Kind(NamedTuple):
    """What kernels are compiled for."""

    dtype: torch.dtype
    kept: torch.dtype  # of the caches
    normed: bool
    plus_one: bool


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
    key_centres: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    **more: Any,
) -> Tensor:
    """Writes into the caches and returns the queries [tokens, heads, head_dim]."""
    whole = key_scales is None and key_centres is None and keys.dtype in BYTES
    if not (whole and keys.is_contiguous() and values.is_contiguous()):
        more |= {"key_scales": key_scales, "key_centres": key_centres, "q_norm": q_norm, "k_norm": k_norm}
        more |= {"eps": eps, "plus_one": plus_one}
        return elementwise.rotate_and_cache(qkv, positions, cos, sin, slots, keys, values, heads, **more)
    pages, kv_heads, page_size, head_dim = keys.shape
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    positions, slots = positions.long(), slots.long()
    out = qkv.new_empty(qkv.shape[0], heads, head_dim)
    norms = [0 if norm is None else norm.data_ptr() for norm in (q_norm, k_norm)]
    arguments = [qkv.data_ptr(), qkv.stride(0), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), len(cos)]
    arguments += [cos.shape[1], slots.data_ptr(), keys.data_ptr(), values.data_ptr(), *norms, out.data_ptr(), heads]
    arguments += [kv_heads, page_size, head_dim, pages * page_size, as_argument(eps)]
    kind = Kind(qkv.dtype, keys.dtype, q_norm is not None, plus_one)
    shared_pool().run(_kernel(kind), arguments, qkv.shape[0])
    return out


@cache
def _kernel(kind: Kind) -> int:
    return compiled("rotate", 3, partial(_rotate_tokens, kind=kind))


def _rotate_tokens(code: Code, arguments: Value, first: Value, last: Value, *, kind: Kind) -> None:
    (qkv, stride, positions, cos, sin, longest, half, slots, keys, values, q_norm, k_norm, out, heads, kv_heads,
     page_size, head_dim, room) = load_integers(code, arguments, 18)  # fmt: skip
    eps = load_argument(code, arguments, 18)
    each = kind.dtype.itemsize
    with code.loop(first, last) as token:
        row = qkv + token * stride * each
        position, slot = code.load(I64, positions, token), code.load(I64, slots, token)
        position = code.select(position < 0, code.constant(I64, 0), position)
        position = code.select(position < longest, position, longest - 1)
        angles = (cos + position * half * 4, sin + position * half * 4, half)
        with code.loop(0, heads) as head:
            source, target = row + head * head_dim * each, out + (token * heads + head) * head_dim * each
            _turn(code, kind, source, q_norm, angles, head_dim, eps, target, kind.dtype)
        inside = (code.constant(I64, -1) < slot) & (slot < room)
        with code.when(inside), code.loop(0, kv_heads) as head:
            page = slot // page_size
            place = ((page * kv_heads + head) * page_size + (slot - page * page_size)) * head_dim * kind.kept.itemsize
            source = row + (heads + head) * head_dim * each
            _turn(code, kind, source, k_norm, angles, head_dim, eps, keys + place, kind.kept)
            source = row + (heads + kv_heads + head) * head_dim * each
            _copy(code, kind, source, head_dim, values + place)


def _turn(
    code: Code,
    kind: Kind,
    source: Value,
    norm: Value,
    angles: tuple[Value, Value, Value],
    head_dim: Value,
    eps: Value,
    target: Value,
    stored: torch.dtype,
) -> None:
    """One head: its first two halves turn, and what is behind them stays."""
    cos, sin, half = angles
    factor = inverse_of_rms(code, kind.dtype, source, head_dim, eps) if kind.normed else None

    def value(place: Value, lanes: int) -> Value:
        number = load_floats(code, kind.dtype, lanes, source, place)
        if factor is None:
            return number
        normal = number * factor.splat(lanes)
        return rounded(code, kind.dtype, weighted(code, kind.dtype, normal, norm, place, kind.plus_one))

    def pair(place: Value, lanes: int) -> None:
        left, right = value(place, lanes), value(place + half, lanes)
        cosine, sine = (code.load(F32.x(lanes), table, place) for table in (cos, sin))
        store_floats(code, stored, left * cosine - right * sine, target, place)
        store_floats(code, stored, right * cosine + left * sine, target, place + half)

    along(code, half, pair)
    behind = half * 2
    along(code, head_dim - behind, lambda place, lanes: store_floats(
        code, stored, value(place + behind, lanes), target, place + behind))  # fmt: skip


def _copy(code: Code, kind: Kind, source: Value, head_dim: Value, target: Value) -> None:
    def copy(place: Value, lanes: int) -> None:
        store_floats(code, kind.kept, load_floats(code, kind.dtype, lanes, source, place), target, place)

    along(code, head_dim, copy)
