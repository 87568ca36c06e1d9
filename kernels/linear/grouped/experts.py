"""A layer of experts from its router to the sum over each token's experts: four launches for few tokens.

routes = route(...)                       who goes where
active = gate_up.matmul(x, routes, ...)   activation(gate) * up of every pair
y = down.matmul(active, routes, ...)      of every pair
combine(y, routes.weights, ...)           of every token, with the shared expert where there is one
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quantkit.kernels.card import card_of
from quantkit.kernels.linear.dense.weight import HalfWeight
from quantkit.kernels.linear.grouped.choices import Way, choose
from quantkit.kernels.linear.grouped.combine import combine
from quantkit.kernels.linear.grouped.router import MOST_LISTED, MOST_TOKENS, route_tokens
from quantkit.kernels.linear.grouped.routes import Routes, Rule, can_stay_unlisted
from quantkit.kernels.linear.grouped.routing import route
from quantkit.kernels.linear.grouped.weight import Clip, GroupedWeight
from quantkit.kernels.linear.op import linear

Router = HalfWeight | Callable[[Tensor], Tensor]


def routes_of(
    x: Tensor, router: Router, rule: Rule, way: Way, correction: Tensor | None = None, own: range | None = None
) -> Routes:
    """As this way of computing them wants the pairs."""
    if not isinstance(router, HalfWeight):
        return route(router(x), rule, way.tile, correction, own)
    splits = max(way.gate_up.splits, way.down.splits)
    listed = way.decoded or not can_stay_unlisted(len(x), rule.per_token, way.tile, splits)
    if len(x) <= MOST_TOKENS and (not listed or len(x) * rule.per_token <= MOST_LISTED):
        return route_tokens(x, router, rule, way.tile, correction, own, listed=listed)
    return route(linear(x, router), rule, way.tile, correction, own)


def sum_of_experts(
    x: Tensor,
    router: Router,
    gate_up: GroupedWeight,
    down: GroupedWeight,
    rule: Rule,
    activation: str,
    *,
    clip: Clip | None = None,
    correction: Tensor | None = None,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
    first: int = 0,
    experts: int | None = None,
    way: Way | None = None,
) -> Tensor:
    """[tokens, hidden] in x's dtype; `shared` [tokens, hidden] and `gate` [tokens, 1] are the shared expert's.

    `router` is its weight, or what computes logits [tokens, experts] from x. Where other ranks have some of the
    `experts`, the weights hold those from number `first` on, and only these add to the sum.
    """
    if way is None:
        way = choose(gate_up, down, x.shape[0] * rule.per_token, card_of(x.device), experts)
    routes = routes_of(x, router, rule, way, correction, range(first, first + down.count))
    weight = gate_up.in_half(x.dtype) if way.decoded else gate_up
    active = weight.matmul(x, routes, way.gate_up, activation, clip)
    del weight  # its memory serves down
    weight = down.in_half(x.dtype) if way.decoded else down
    return combine(weight.matmul(active, routes, way.down), routes.weights, shared, gate)
