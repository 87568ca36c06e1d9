"""What a layer with experts means, in plain torch: the standard for kernels, and what runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantkit.formats import Format, QuantizedWeight

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

    `logits` [tokens, experts] are the router's; the rest is `stages.Routing`, with `correction` [experts] where scores
    are corrected. Scores are float32, and of equal ones the lower number is chosen. Weights come in the dtype of the
    logits.
    """
    scores = logits.float().softmax(-1) if scoring == "softmax" else logits.float().sigmoid()
    preferred = scores if correction is None else scores + correction.float()
    if groups > 1:
        by_group = preferred.unflatten(-1, (groups, -1))
        best = by_group.topk(1 if scoring == "softmax" else 2, dim=-1).values.sum(-1)  # [tokens, groups]
        open_groups = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _largest(best, groups_chosen), True)
        preferred = by_group.masked_fill(~open_groups[..., None], float("-inf")).flatten(-2)
    chosen = _largest(preferred, per_token)
    weights = scores.gather(-1, chosen)
    if normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _NO_ZERO)
    return chosen, (weights * scale).to(logits.dtype)


def _largest(values: Tensor, count: int) -> Tensor:
    """Where the largest stand, in their order, which `topk` leaves open for equal ones."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def sum_of_experts(x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[Mlp], first: int = 0) -> Tensor:
    """For every token of x [tokens, hidden] the weighted sum of what its experts make of it, in x's dtype.

    `experts` are those from number `first` on; what others would add is left out. An expert sees the tokens that chose
    it, and is not called where none did. The products are added in float32 in the order of the experts' numbers, so
    that a token's sum is the same whoever else is in the batch.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number in chosen.unique().tolist():
        if not first <= number < first + len(experts):
            continue
        tokens, place = (chosen == number).nonzero(as_tuple=True)
        output = experts[number - first](x[tokens]).float() * weights[tokens, place, None].float()
        total.index_add_(0, tokens, output)
    return total.to(x.dtype)


def linear_of_experts(
    x: Tensor, experts: Tensor, fmt: Format, planes: Sequence[QuantizedWeight], bias: Tensor | None = None
) -> Tensor:
    """Every row of x [rows, inputs] times the weight of its own expert, one of `experts` [rows], in x's dtype.

    Formats that round activations too see all rows together, those of other experts included: so LLM.int8 finds columns
    with outliers. `bias` is [experts, outputs].
    """
    y = x.new_zeros(len(x), planes[0].shape[0])
    for number in experts.unique().tolist():
        own = experts == number
        served = fmt.served_inputs(x, planes[number]) if fmt.input_rounding else x
        weight = planes[number].dequantize(x.dtype)
        y[own] = torch.nn.functional.linear(served[own], weight, None if bias is None else bias[number])
    return y


def sum_of_every_expert(x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[Mlp], first: int = 0) -> Tensor:
    """The same where the host may not know who was chosen: every expert sees all tokens, which is slow."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number, expert in enumerate(experts, first):
        chose = chosen == number
        weight = (weights.float() * chose).sum(-1, keepdim=True)
        total += torch.where(chose.any(-1, keepdim=True), expert(x).float() * weight, 0.0)
    return total.to(x.dtype)


def add_shared_expert(routed: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
    """Beside the chosen experts, the one that sees every token; `gate` [tokens, 1] says by its sigmoid how much of it.

    Without a gate all of it counts.
    """
    return routed + (shared if gate is None else torch.sigmoid(gate) * shared)
