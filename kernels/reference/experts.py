"""What a layer with experts means, in plain torch: the standard for kernels, and what runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Mlp = Callable[[Tensor], Tensor]  # [tokens, hidden] -> the same


def choose_experts(logits: Tensor, per_token: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """The numbers of each token's experts, and how much each of them counts in the sum, [tokens, per_token] both.

    `logits` [tokens, experts] are the router's. The softmax over all experts is float32; `normalized` divides the
    weights of the chosen ones by their sum. Weights come in the dtype of the logits.
    """
    weights, chosen = logits.float().softmax(-1).topk(per_token, dim=-1)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights.to(logits.dtype)


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
