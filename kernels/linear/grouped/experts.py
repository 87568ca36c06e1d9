"""A layer of experts from its router's logits to the sum over each token's experts: four launches for few tokens.

routes = route(...)                       who goes where
active = gate_up.matmul(x, routes, ...)   activation(gate) * up of every pair
y = down.matmul(active, routes, ...)      of every pair
combine(y, routes.weights, ...)           of every token, with the shared expert where there is one
"""

from __future__ import annotations

from torch import Tensor

from quantkit.kernels.card import card_of
from quantkit.kernels.linear.grouped.choices import Way, choose
from quantkit.kernels.linear.grouped.combine import combine
from quantkit.kernels.linear.grouped.routes import Rule
from quantkit.kernels.linear.grouped.routing import route
from quantkit.kernels.linear.grouped.weight import GroupedWeight


def sum_of_experts(
    x: Tensor,
    logits: Tensor,
    gate_up: GroupedWeight,
    down: GroupedWeight,
    rule: Rule,
    activation: str,
    *,
    correction: Tensor | None = None,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
    way: Way | None = None,
) -> Tensor:
    """[tokens, hidden] in x's dtype; `shared` [tokens, hidden] and `gate` [tokens, 1] are the shared expert's."""
    if way is None:
        way = choose(gate_up, down, x.shape[0] * rule.per_token, card_of(x.device))
    routes = route(logits, rule, way.tile, correction)
    first = gate_up.in_half(x.dtype) if way.decoded else gate_up
    active = first.matmul(x, routes, way.gate_up, activation)
    del first  # its memory serves down
    second = down.in_half(x.dtype) if way.decoded else down
    return combine(second.matmul(active, routes, way.down), routes.weights, shared, gate)
