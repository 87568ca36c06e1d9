"""What the attention kernels mean, in plain torch: the standard of their tests, and what runs without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.attention.integer_codes import BY_DTYPE
from quantkit.kernels.reference.integer_codes import decode


def gather(cache: Tensor, pages: Tensor, tokens: int) -> Tensor:
    """The first `tokens` rows of a sequence, [tokens, kv_heads, dim], from cache [pages, kv_heads, page_size, dim]."""
    kv_heads, page_size, head_dim = cache.shape[1:]
    used = pages[: -(-tokens // page_size)].long()
    return cache[used].transpose(1, 2).reshape(-1, kv_heads, head_dim)[:tokens]


def _read(cache: Tensor, scale: Tensor | None, pages: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """What `gather` finds, as numbers: `scale` is that of each KV head, or the words of a cache of integers."""
    rows = gather(cache, pages, tokens)
    if cache.dtype in BY_DTYPE and scale is not None:
        return decode(rows, gather(scale[..., None], pages, tokens)[..., 0], dtype)
    return rows.to(dtype) if scale is None else rows.to(dtype) * scale.to(dtype)[:, None]


def visible(new: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """Which key each new token may look at: bool [new, context]."""
    position = torch.arange(context - new, context, device=device)[:, None]
    key = torch.arange(context, device=device)[None, :]
    seen = key <= position
    return seen if window is None else seen & (key > position - window)


def visible_in_tree(ancestors: Tensor, context: int) -> Tensor:
    """The same where bit j of a new token's entry says whether it sees new token j; old tokens are always seen."""
    node = torch.arange(context, device=ancestors.device) - (context - len(ancestors))
    return (node < 0) | ((ancestors[:, None] >> node.clamp(min=0)) & 1 == 1)


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    ancestors: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [new, heads, dim], k and v [context, kv_heads, dim], computed in their dtype: [new, heads, dim].

    `sinks` [heads] are one more score of every query, of a token without a value.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    seen = visible(len(q), len(k), window, q.device) if ancestors is None else visible_in_tree(ancestors, len(k))
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def attend(
    q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    page_table: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    ancestors: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """See `attention/attend.py`; computed and returned in `dtype`. Rows of no sequence are zero."""
    if ancestors is not None and window is not None:
        raise InputError("attention: ancestors cannot be used with a window; leave ancestors or the window out")
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    starts = query_starts.tolist()
    for sequence, context in enumerate(context_lengths.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        k = _read(cache_k, k_scale, page_table[sequence], context, dtype)
        v = _read(cache_v, v_scale, page_table[sequence], context, dtype)
        new = q[begin:end].to(dtype)
        tree = None if ancestors is None else ancestors[begin:end]
        out[begin:end] = attend_one(
            new, k, v, scale=scale, window=window, soft_cap=soft_cap, ancestors=tree, sinks=sinks
        )
    return out
