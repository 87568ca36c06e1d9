"""Layers of experts: routing, every kind of stacked weight in every way that is chosen or tried, and their sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from compile_matrix.case import Case
from compile_matrix.weights import SERVED, weight_of
from quantkit.kernels.card import Card
from quantkit.kernels.linear.dense.weight import lay_out
from quantkit.kernels.linear.grouped.choices import candidates, choose
from quantkit.kernels.linear.grouped.combine import combine
from quantkit.kernels.linear.grouped.router import route_tokens
from quantkit.kernels.linear.grouped.routes import MOST_UNLISTED, Routes, Rule, can_stay_unlisted, most_tiles
from quantkit.kernels.linear.grouped.routing import route
from quantkit.kernels.linear.grouped.stacks import stack_of
from quantkit.kernels.linear.grouped.tile import TileConfig
from quantkit.kernels.linear.grouped.weight import GroupedPacked, GroupedWeight, lay_out_half

_FORMATS = ("w4", "w4-g64", "w4-g32", "w4-asym", "awq", "w8", "w3", "w2", "nf4", "nf4-plain", "fp4", "mxfp4", "nvfp4")
_CLIPPED = ("half", "mxfp4")  # as gpt-oss has them: with biases, too
_EXPERTS, _PER_TOKEN, _HIDDEN, _WIDTH = 2, 2, 512, 256
_TOKENS = (1, 8, 20, 60, 200)  # one or more for every entry of the tables
_IN_BOTH_DTYPES = ("w4", "nf4", "half")  # the others differ from these in how codes become numbers
# Of the first three, which need most registers and shared memory, all; of the others few tokens and prompts.
_EIGHT_BIT = dict.fromkeys(("llm-int8", "fp8-block", "fp8-exact"), _TOKENS) | dict.fromkeys(
    ("w8a8", "fp8", "fp8-static"), (8, 200)
)
_RULES = {  # the largest first, which is compiled for every number of tokens
    "256 in groups": (256, Rule(8, scoring="sigmoid", groups=8, groups_chosen=4, scale=2.5)),
    "128, 8 of them": (128, Rule(8)),
    "8, 2 of them": (8, Rule(2, normalized=False)),
    "160 in groups": (160, Rule(6, groups=8, groups_chosen=3)),
}


def grouped_cases(card: Card) -> Iterator[Case]:
    for number, (name, (experts, rule)) in enumerate(_RULES.items()):
        for tokens in (16, 300) if number else (1, 16, 300):  # one program for the first two
            launch = lambda dtype, how=(tokens, experts, rule): _route(*how, dtype)  # noqa: E731
            yield Case(f"routes of {tokens} to {name}", launch)
        for tokens in (8, 32) if number else (1, 8, 32):  # more than 8 are blocks of 8; those of 32 are listed
            launch = lambda dtype, how=(tokens, experts, rule): _route_tokens(*how, dtype)  # noqa: E731
            yield Case(f"router of {tokens} to {name}", launch)
    for shared in (False, True):
        yield Case(f"sum of experts, shared {shared}", lambda dtype, shared=shared: _combine(shared, dtype))
    for name in (*_FORMATS, "half"):
        for tokens in _TOKENS:
            launch = lambda dtype, how=(name, tokens, card): _chosen(*how, dtype)  # noqa: E731
            yield Case(f"experts in {name} for {tokens}", launch, slow=name not in _IN_BOTH_DTYPES)
    for name, numbers in _EIGHT_BIT.items():
        for tokens in numbers:
            launch = lambda dtype, how=(name, tokens, card): _chosen(*how, dtype)  # noqa: E731
            yield Case(f"experts in {name} for {tokens}", launch, slow=len(numbers) > 2)
    for name in ("w4", "nf4", "half"):
        for tile, config in dict.fromkeys(_tried(name)):
            launch = lambda dtype, how=(name, tile, config): _try(*how, dtype)  # noqa: E731
            yield Case(f"experts in {name}, tiles of {tile}, {config}", launch, tried=True)


def _tried(name: str) -> Iterator[tuple[int, TileConfig]]:
    for tokens in _TOKENS:
        for tile, config in candidates(_weights(name, torch.bfloat16)[1], tokens * _PER_TOKEN, _EXPERTS):
            yield tile, replace(config, splits=1, streamed=True)  # splits are a number, streams a hint to the cache


def _route(tokens: int, experts: int, rule: Rule, dtype: torch.dtype) -> None:
    correction = torch.zeros(experts) if rule.scoring == "sigmoid" else None
    route(torch.zeros(tokens, experts, dtype=dtype), rule, 8, correction)


def _route_tokens(tokens: int, experts: int, rule: Rule, dtype: torch.dtype) -> None:
    correction = torch.zeros(experts) if rule.scoring == "sigmoid" else None
    router = lay_out(torch.zeros(experts, 2048, dtype=dtype))
    listed = tokens * rule.per_token > MOST_UNLISTED
    route_tokens(torch.zeros(tokens, 2048, dtype=dtype), router, rule, 8, correction, listed=listed)


def _combine(shared: bool, dtype: torch.dtype) -> None:
    y, weights = torch.zeros(6, _HIDDEN, dtype=dtype), torch.zeros(3, 2, dtype=dtype)
    combine(y, weights, y[:3] if shared else None, weights[:, :1] if shared else None)


def _chosen(name: str, tokens: int, card: Card, dtype: torch.dtype) -> None:
    gate_up, down = _weights(name, dtype)
    way = choose(gate_up, down, tokens * _PER_TOKEN, card)
    routes = _routes(tokens, way.tile)
    if not way.decoded and can_stay_unlisted(tokens, _PER_TOKEN, way.tile, way.gate_up.splits):
        routes = routes.unlisted
    if way.decoded:
        gate_up, down = gate_up.in_half(dtype), down.in_half(dtype)
    x, active = torch.zeros(tokens, _HIDDEN, dtype=dtype), torch.zeros(routes.pairs, _WIDTH, dtype=dtype)
    gate_up.matmul(x, routes, way.gate_up, "silu")
    down.matmul(active, routes, way.down)
    if name in _CLIPPED:
        _with_bias(gate_up, dtype).matmul(x, routes, way.gate_up, "silu", (7.0, 1.702))
        _with_bias(down, dtype).matmul(active, routes, way.down)
    elif name in _IN_BOTH_DTYPES:
        gate_up.matmul(x, routes, way.gate_up, "gelu_pytorch_tanh")
    if isinstance(down, GroupedPacked) and name == "w4":
        order = torch.zeros(_WIDTH, dtype=torch.int32)
        ordered = GroupedPacked(tuple(replace(plane, order=order) for plane in down.planes))
        ordered.matmul(active, routes, way.down)
        ordered.in_half(dtype)


def _with_bias(weight: Any, dtype: torch.dtype) -> Any:
    return replace(weight, bias=torch.zeros(weight.count, weight.outputs, dtype=dtype))


def _try(name: str, tile: int, config: TileConfig, dtype: torch.dtype) -> None:
    """Gate and up, which hold twice as much as down."""
    gate_up, _ = _weights(name, dtype)
    gate_up.matmul(torch.zeros(4, _HIDDEN, dtype=dtype), _routes(4, tile), config, "silu")


def _routes(tokens: int, tile: int) -> Routes:
    pairs = tokens * _PER_TOKEN
    tiles = torch.zeros(3, most_tiles(pairs, _EXPERTS, tile), dtype=torch.int32)
    chosen = torch.zeros(tokens, _PER_TOKEN, dtype=torch.int32)
    return Routes(chosen, chosen.bfloat16(), range(_EXPERTS), tile, chosen.flatten(), tiles)


@cache
def _weights(name: str, dtype: torch.dtype) -> tuple[GroupedWeight, GroupedWeight]:
    sizes = ((2 * _EXPERTS, _WIDTH, _HIDDEN), (_EXPERTS, _HIDDEN, _WIDTH))
    if name == "half":
        gate_up, down = (lay_out_half(torch.zeros(size, dtype=dtype)) for size in sizes)
        return gate_up, down
    gate_up, down = (_stacked(name, *size) for size in sizes)
    return gate_up, down


def _stacked(name: str, planes: int, outputs: int, inputs: int) -> Any:
    stack = stack_of(SERVED[name]("bfloat16"), planes)
    for plane in range(planes):
        stack.put(plane, weight_of(name, outputs, inputs))
    return stack.finish()
