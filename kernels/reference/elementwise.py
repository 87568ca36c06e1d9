"""What the small kernels mean, in plain torch: the standard that tests compare with, and what runs without a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.kernels.attention.integer_codes import BY_DTYPE, INT4
from quantkit.kernels.reference.integer_codes import encode, rotate_heads


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """See `norm.py`."""
    normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if plus_one:
        return (normal * (1.0 + weight.float())).to(x.dtype)
    return normal.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """See `norm.py`: writes the sum over `residual`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps, plus_one=plus_one)


def gated_activation(gate_up: Tensor, activation: str, *, clip: tuple[float, float] | None = None) -> Tensor:
    """See `activation.py`. With a limit and a factor, both halves are clipped, the gate above only, and SiLU's sigmoid
    is that of the factor times the gate, times up + 1 (gpt-oss)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if clip is not None:
        limit, factor = clip
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(factor * gate) * (up + 1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active * up


def embed(ids: Tensor, table: Tensor, *, scale: float | None = None) -> Tensor:
    """See `embedding.py`."""
    if len(table) == 0:
        return table.new_zeros(len(ids), table.shape[1])
    known = (ids >= 0) & (ids < len(table))
    rows = table[torch.where(known, ids, 0)] * known[:, None]
    return rows if scale is None else rows * torch.tensor(scale, dtype=table.dtype, device=table.device)


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
) -> Tensor:
    """See `rotary.py`: writes into the caches and returns the queries."""
    kind = BY_DTYPE.get(keys.dtype)
    kv_heads, head_dim = keys.shape[1], keys.shape[3] if kind is None else keys.shape[3] * 8 // kind.bits
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=1)  # [tokens, heads, head_dim]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps, plus_one=plus_one), rms_norm(k, k_norm, eps, plus_one=plus_one)
    rows = positions.long().clamp(0, len(cos) - 1)
    q, k = (turn_pairs(part.float(), cos[rows], sin[rows]) for part in (q, k))
    k = k if key_centres is None else k - key_centres
    if kind is INT4:
        q, k = rotate_heads(q), rotate_heads(k)
    store(k, slots, keys, key_scales)
    store(v.float(), slots, values, value_scales)
    return q.to(qkv.dtype)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x, float32 [tokens, heads, head_dim], turned by rope: cos and sin are [tokens, rotary_dim / 2]."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def store(x: Tensor, slots: Tensor, cache: Tensor, scales: Tensor | None) -> None:
    """Rows x, float32 [tokens, kv_heads, head_dim], into their slots of one paged cache; `scales` are those of 8-bit
    floats, or the words of integers, which are written, too."""
    pages, _, page_size, _ = cache.shape
    kind, words = BY_DTYPE.get(cache.dtype), None
    if kind is not None:
        x, words = encode(x, kind)
    elif scales is not None:
        x = (x / scales[:, None]).clamp(-448, 448)
    kept = (slots >= 0) & (slots < pages * page_size)
    page, offset = slots[kept] // page_size, slots[kept] % page_size
    stored = x[kept].to(cache.dtype)
    if cache.dtype == torch.float8_e4m3fn:  # torch cannot index it
        cache, stored = cache.view(torch.uint8), stored.view(torch.uint8)
    cache[page, :, offset] = stored
    if words is not None and scales is not None:
        scales[page, :, offset] = words[kept]
