"""What a layer with experts means, in plain torch: the standard for kernels, and what runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Mlp = Callable[[Tensor], Tensor]  # [tokens, hidden] -> the same
_NO_ZERO = 1e-20  # beside a sum of sigmoids, which may all be 0


def choose_experts(
    logits: Tensor,
    per_token: int,
    *,
    normalized: bool,
    scoring: str = "softmax",
    correction: Tensor | None = None,
    groups: int = 1,
    groups_chosen: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The numbers of each token's experts, and how much each of them counts in the sum, [tokens, per_token] both.

    `logits` [tokens, experts] are the router's. A score is the softmax over all experts or the sigmoid of one, float32.
    Experts are chosen by their scores plus `correction` [experts], from the `groups_chosen` best of `groups` neighbours
    of equal number: a group is as good as its best expert, or with a correction as the sum of its two best. Weights
    are the scores of the chosen, divided by their sum where `normalized`, times `scale`, in the dtype of the logits.
    """
    scores = logits.float().softmax(-1) if scoring == "softmax" else logits.float().sigmoid()
    ranking = scores if correction is None else scores + correction.float()
    if groups_chosen < groups:
        deciding = 1 if correction is None else 2
        ranking = ranking.masked_fill(~_in_best_groups(ranking, groups, groups_chosen, deciding), float("-inf"))
    chosen = ranking.topk(per_token, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _NO_ZERO)
    return chosen, (weights * scale).to(logits.dtype)


def _in_best_groups(ranking: Tensor, groups: int, groups_chosen: int, deciding: int) -> Tensor:
    """Whether each expert is in one of the best groups, by the sum of their `deciding` best: bool [tokens, experts]."""
    grouped = ranking.unflatten(-1, (groups, -1))
    best = grouped.topk(deciding, dim=-1).values.sum(-1).topk(groups_chosen, dim=-1).indices
    kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=ranking.device).scatter_(-1, best, True)
    return kept[..., None].expand_as(grouped).flatten(-2)


def sum_of_experts(x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[Mlp]) -> Tensor:
    """For every token of x [tokens, hidden] the weighted sum of what its experts make of it, in x's dtype.

    An expert sees the tokens that chose it, and is not called where none did. The products are added in float32 in the
    order of the experts' numbers, so that a token's sum is the same whoever else is in the batch.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number in chosen.unique().tolist():
        tokens, place = (chosen == number).nonzero(as_tuple=True)
        output = experts[number](x[tokens]).float() * weights[tokens, place, None].float()
        total.index_add_(0, tokens, output)
    return total.to(x.dtype)


def add_shared_expert(routed: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
    """Beside the chosen experts, the one that sees every token; `gate` [tokens, 1] says by its sigmoid how much of it.

    Without a gate all of it counts.
    """
    return routed + (shared if gate is None else torch.sigmoid(gate) * shared)
