"""What latent attention means, in plain torch: what runs on a CPU, and the standard for kernels to come.

A head's key is what `key_up` makes of a token's latent, and its value what `value_up` does. Neither is ever computed:
q . (key_up latent) is (key_up^T q) . latent, so queries go into the latents' space, one cache of latents serves all
heads as keys and values, and what attention gives comes back through `value_up`. Prompts are computed so too, though
expanding their keys and values would take fewer products: a chunk would have to expand all latents before it again, and
a token's numbers would depend on how its prompt was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.kernels.reference.attention import gather, visible, visible_in_tree
from quantkit.kernels.reference.elementwise import store


def rotate_latent(
    q: Tensor,
    kept: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    interleaved: bool,
    scales: Tensor | None = None,
) -> Tensor:
    """Turns the last of q [tokens, heads, plain + rope] and of kept [tokens, rank + rope], which is a latent and a key.

    Writes kept into its slots of cache [pages, 1, page_size, rank + rope]; returns the queries. cos and sin are float32
    [positions, rope / 2]. Where pairs are `interleaved`, both come out with their halves behind each other.
    """
    rows = positions.long().clamp(0, len(cos) - 1)
    kept = _turn_last(kept[:, None].float(), cos[rows], sin[rows], interleaved)
    store(kept, slots, cache, scales)
    return _turn_last(q.float(), cos[rows], sin[rows], interleaved).to(q.dtype)


def _turn_last(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [tokens, heads, ...] with its last numbers turned; cos and sin [tokens, half of these]."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    plain, turned = x[..., : -2 * half], x[..., -2 * half :]
    pairs = turned.unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pairs.unbind(-1 if interleaved else -2)
    return torch.cat((plain, first * cos - second * sin, second * cos + first * sin), dim=-1)


def into_latents(q: Tensor, key_up: Tensor) -> Tensor:
    """Queries [tokens, heads, plain + rope] by key_up [heads, plain, rank]: [tokens, heads, rank + rope]."""
    plain = key_up.shape[1]
    return torch.cat((torch.einsum("thp,hpr->thr", q[..., :plain], key_up), q[..., plain:]), dim=-1)


def attend_latents(
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    *,
    rank: int,
    scale: float,
    cache_scale: Tensor | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Queries in the latents' space, [tokens, heads, rank + rope], over the cache: [tokens, heads, rank], in q's dtype.

    Tables, lengths and ancestors are those of `attention/attend.py`. Computed in float32; rows of no sequence are zero.
    """
    out = torch.zeros(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
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
        scores = torch.einsum("qhd,kd->hqk", q[begin:end].float(), kept) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,kr->qhr", weights, kept[:, :rank]).to(q.dtype)
    return out


def out_of_latents(attended: Tensor, value_up: Tensor) -> Tensor:
    """What heads attended to, [tokens, heads, rank], by value_up [heads, value, rank]: [tokens, heads, value]."""
    return torch.einsum("thr,hvr->thv", attended, value_up)
