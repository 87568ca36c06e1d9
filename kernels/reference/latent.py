"""What latent attention means, in plain torch: what runs on a CPU, and the standard of the kernels.

A head's key is what `key_up` makes of a token's latent, and its value what `value_up` does. In absorbed form neither is
ever computed: q . (key_up latent) is (key_up^T q) . latent, so queries go into the latents' space, one cache of latents
serves all heads as keys and values, and what attention gives comes back through `value_up`. The expanded form computes
both, which takes fewer products where many new tokens share them: a GPU does so for long pieces of prompts
(`attention/latent/expanded.py`). A CPU never does, so that a token's numbers do not depend on how its prompt was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.kernels.attention.latent.pieces import PromptPieces
from quantkit.kernels.reference.attention import gather, visible, visible_in_tree
from quantkit.kernels.reference.elementwise import rms_norm, store


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
    """Turns q [tokens, heads, rope], the part of queries that turns; norms and keeps what is kept of tokens.

    `kept` [tokens, rank + rope] is a latent, which goes through `norm` [rank], and a key, which turns; both go into
    their slots of cache [pages, 1, page_size, rank + rope]. cos and sin are float32 [positions, rope / 2]. Where pairs
    are `interleaved`, queries and keys come out with their halves behind each other.
    """
    rank, rows = norm.shape[0], positions.long().clamp(0, len(cos) - 1)
    key = _turn(kept[:, None, rank:].float(), cos[rows], sin[rows], interleaved)
    latents = rms_norm(kept[:, :rank], norm, eps).float()
    store(torch.cat((latents[:, None], key), dim=-1), slots, cache, scales)
    return _turn(q.float(), cos[rows], sin[rows], interleaved).to(q.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [tokens, heads, rope]; cos and sin [tokens, rope / 2]."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    pairs = x.unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pairs.unbind(-1 if interleaved else -2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def into_latents(q: Tensor, key_up: Tensor) -> Tensor:
    """What does not turn of queries, [tokens, heads, plain], by key_up [heads, plain, rank]: [tokens, heads, rank]."""
    return torch.einsum("thp,hpr->thr", q, key_up)


def attend_latents(
    q: Tensor,
    turned: Tensor,
    cache: Tensor,
    page_table: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    cache_scale: Tensor | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Queries in the latents' space, [tokens, heads, rank], and their turned part, [tokens, heads, rope], over the
    cache: [tokens, heads, rank], in q's dtype.

    Tables, lengths and ancestors are those of `attention/attend.py`. Computed in float32; rows of no sequence are zero.
    """
    out, rank, whole = torch.zeros_like(q), q.shape[2], torch.cat((q, turned), dim=2).float()
    starts = query_starts.tolist()
    for sequence, context in enumerate(context_lengths.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        kept = gather(cache, page_table[sequence], context)[:, 0].float()  # [context, rank + rope]
        if cache_scale is not None:
            kept = kept * cache_scale
        tree = None if ancestors is None else ancestors[begin:end]
        seen = visible(end - begin, context, None, q.device) if tree is None else visible_in_tree(tree, context)
        scores = torch.einsum("qhd,kd->hqk", whole[begin:end], kept) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,kr->qhr", weights, kept[:, :rank]).to(q.dtype)
    return out


def out_of_latents(attended: Tensor, value_up: Tensor) -> Tensor:
    """What heads attended to, [tokens, heads, rank], by value_up [heads, value, rank]: [tokens, heads, value]."""
    return torch.einsum("thr,hvr->thv", attended, value_up)


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
) -> None:
    """Attention by keys and values that are made of latents; see `attention/latent/expanded.py`. In float32."""
    plain, rank = q.shape[2], up.shape[2]
    every = cache.float().flatten(0, 2)[pieces.kv_slots] * (1.0 if cache_scale is None else cache_scale)
    new, rows = pieces.new_starts.diff().tolist(), pieces.first_rows.tolist()
    for sequence, first in enumerate(pieces.first_queries.tolist()):
        own, kept = slice(first, first + new[sequence]), every[rows[sequence] : rows[sequence + 1]]
        keys, values = torch.einsum("kr,hur->khu", kept[:, :rank], up.float()).tensor_split((plain,), dim=2)
        scores = torch.einsum("qhp,khp->hqk", q[own].float(), keys)
        scores += torch.einsum("qhp,kp->hqk", turned[own].float(), kept[:, rank:])
        seen = visible(new[sequence], len(kept), None, q.device)
        weights = (scores * scale).masked_fill(~seen, float("-inf")).softmax(-1)
        out[own] = torch.einsum("hqk,khv->qhv", weights, values).to(out.dtype)
