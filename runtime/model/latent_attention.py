"""Latent attention of the decoder: which sequences of a step are computed in which form, and both forms.

Answers, guesses and short pieces of prompts are absorbed: their queries go to the latents. Of longer pieces the latents
are expanded, where a GPU runs them and the host knows their lengths (`kernels/attention/latent/expanded.py`): not in a
graph, so graphs of prompts leave them alone. In a step of both, tokens that are absorbed are gathered, and those that
are not stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from quantkit.arch.sizes import LatentSizes
from quantkit.kernels.attention.latent.pieces import PromptPieces, group_sequences, make_pieces
from quantkit.runtime.model.batch import Batch, KvCache
from quantkit.runtime.model.layers import LatentProjections
from quantkit.runtime.model.ops import Ops


@dataclass(frozen=True)
class Absorbed:
    """Sequences of a step that attend to latents."""

    rows: Tensor | None  # int64, which tokens of the step are theirs; None: all
    page_table: Tensor
    context_lengths: Tensor
    query_starts: Tensor
    max_queries: int
    ancestors: Tensor | None


@dataclass(frozen=True)
class LatentStep:
    """A step's sequences by form, the same for all layers."""

    absorbed: Absorbed | None
    expanded: tuple[PromptPieces, ...] = ()


def divide_step(batch: Batch, cache: KvCache, sizes: LatentSizes, ops: Ops) -> LatentStep:
    """Made of what the host knows: nobody waits for the device."""
    whole = Absorbed(
        None, batch.page_table, batch.context_lengths, batch.query_starts, batch.max_queries, batch.ancestors
    )
    if ops.attend_expanded is None or batch.host_lengths is None or batch.max_queries <= sizes.most_absorbed:
        return LatentStep(whole)
    starts, contexts = batch.host_lengths
    new = [end - begin for begin, end in pairwise(starts)]
    long = [sequence for sequence, count in enumerate(new) if count > sizes.most_absorbed]
    if not long or batch.ancestors is not None:
        return LatentStep(whole)
    pieces = tuple(
        make_pieces(group, starts, contexts, batch.page_table, cache.page_size)
        for group in group_sequences(contexts, long)
    )
    short = [sequence for sequence, count in enumerate(new) if 0 < count <= sizes.most_absorbed]
    return LatentStep(_absorbed(batch, short, starts) if short else None, pieces)


def _absorbed(batch: Batch, sequences: list[int], starts: list[int]) -> Absorbed:
    """Some sequences as if the step had no others."""
    rows = [row for sequence in sequences for row in range(starts[sequence], starts[sequence + 1])]
    new = [starts[sequence + 1] - starts[sequence] for sequence in sequences]
    own_starts = list(accumulate(new, initial=0))
    host = torch.tensor([*sequences, *rows, *own_starts])
    device = batch.ids.device
    sent = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    at, of_tokens, query_starts = sent.split([len(sequences), len(rows), len(own_starts)])
    return Absorbed(of_tokens, batch.page_table[at], batch.context_lengths[at], query_starts.int(), max(new), None)


def attend(
    step: LatentStep,
    q: Tensor,
    turned: Tensor,
    pages: Tensor,
    own: LatentProjections,
    ops: Ops,
    *,
    scale: float,
    cache_scale: Tensor | None,
    scratch: Any,
) -> Tensor:
    """What heads attend to, [tokens, heads, value]; q [tokens, heads, plain] and turned [tokens, heads, rope]."""
    out = q.new_empty(*q.shape[:2], own.value_up.shape[1])
    for pieces in step.expanded:
        assert ops.attend_expanded is not None
        ops.attend_expanded(q, turned, pages, own.up, pieces, out, scale=scale, cache_scale=cache_scale)
    some = step.absorbed
    if some is None:
        return out
    if some.rows is not None:
        q, turned = q[some.rows], turned[some.rows]
    attended = ops.attend_latents(
        torch.bmm(q.transpose(0, 1), own.key_up).transpose(0, 1),  # into the latents' space
        turned,
        pages,
        some.page_table,
        some.context_lengths,
        some.query_starts,
        scale=scale,
        max_queries=some.max_queries,
        cache_scale=cache_scale,
        ancestors=some.ancestors,
        scratch=scratch,
    )
    values = out if some.rows is None else out.new_empty(len(q), *out.shape[1:])
    torch.bmm(attended.transpose(0, 1), own.value_up.transpose(1, 2), out=values.transpose(0, 1))
    if some.rows is not None:
        out[some.rows] = values
    return out
