"""Times of a layer of experts on the GPU that is there: its launches one by one, and every candidate of both products.

    python -m quantkit.eval.kernels.experts --shape qwen3-30b-a3b --format w4 --tokens 1,8,32,256,8192 --tried

Weights are random, and so is the routing. Calls with other routings follow each other in one CUDA graph, so that what
one has read is no longer in a cache when its turn comes again. A candidate whose result differs from that of the way
that `choices.py` takes is not listed. What is best belongs there, into the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.eval.engine.shape_formats import shape_format
from quantkit.eval.engine.shapes import RandomWeights
from quantkit.eval.shapes import EXPERT_SHAPES
from quantkit.kernels.card import card_of
from quantkit.kernels.linear.grouped.choices import Way, candidates, choose
from quantkit.kernels.linear.grouped.combine import combine
from quantkit.kernels.linear.grouped.experts import routes_of, sum_of_experts
from quantkit.kernels.linear.grouped.routes import Routes, can_stay_unlisted
from quantkit.kernels.linear.grouped.routing import route
from quantkit.kernels.linear.grouped.tile import TileConfig
from quantkit.kernels.linear.grouped.weight import GroupedPacked, GroupedWeight
from quantkit.kernels.linear.tuning import microseconds
from quantkit.kernels.reference.compare import relative_error
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.experts import GroupedMlp

_CALLS = 16  # with a routing of their own each
_LISTED = 6  # candidates of a product
_LARGEST_ERROR = 1e-2
Line = tuple[str, float]  # what, microseconds


def layer_of(shape: str, format_name: str, device: torch.device) -> GroupedMlp:
    """One layer at random."""
    config = read_model_config(EXPERT_SHAPES[shape])
    one = replace(config, windows=config.windows[:1], stages=config.stages[:1], vocab=256)
    fmt = shape_format(shape, format_name, "bfloat16")
    mlp = RandomWeights(one, fmt, torch.bfloat16, device).load().blocks[0].mlp
    if not isinstance(mlp, GroupedMlp):
        raise InputError(f"experts in '{format_name}' have no routed kernel on {device}")
    return mlp


class Timed:
    """One layer and one number of tokens."""

    def __init__(self, mlp: GroupedMlp, tokens: int) -> None:
        device, self._mlp = mlp.down.device, mlp
        self._pairs, self._experts = tokens * mlp.rule.per_token, mlp.down.count
        self._x = torch.randn(tokens, mlp.gate_up.inputs, device=device).bfloat16()
        self._inputs = torch.randn(_CALLS, *self._x.shape, device=device).bfloat16()
        self._active = torch.randn(self._pairs, mlp.down.inputs, device=device).bfloat16()
        self._logits = torch.randn(_CALLS, tokens, self._experts, device=device).bfloat16()
        self.way = choose(mlp.gate_up, mlp.down, self._pairs, card_of(device))

    def launches(self) -> Iterator[Line]:
        """As `choices.py` says, and all of them together."""
        mlp, way = self._mlp, self.way
        routes = self._routes(way.tile, max(way.gate_up.splits, way.down.splits))
        yield "router and routing", self._time(lambda number: routes_of(self._x, mlp.scorer, mlp.rule, way))
        gate_up, down = mlp.gate_up, mlp.down
        if way.decoded:
            yield "decoding of gate and up", microseconds([lambda: mlp.gate_up.in_half(torch.bfloat16)])
            yield "decoding of down", microseconds([lambda: mlp.down.in_half(torch.bfloat16)])
            gate_up, down = gate_up.in_half(torch.bfloat16), down.in_half(torch.bfloat16)
        yield "gate and up", self._product(gate_up, self._x, routes, way.gate_up, mlp.activation)
        yield "down", self._product(down, self._active, routes, way.down, None)
        y = torch.randn(self._pairs, down.outputs, device=self._x.device).bfloat16()
        yield "sum", self._time(lambda number: combine(y, routes[number].weights))
        yield (
            "whole layer",
            self._time(
                lambda number: sum_of_experts(
                    self._inputs[number],
                    mlp.scorer,
                    mlp.gate_up,
                    mlp.down,
                    mlp.rule,
                    mlp.activation,
                    clip=mlp.clip,
                    way=way,
                )
            ),
        )

    def tried(self) -> Iterator[tuple[str, float, str]]:
        """(product, microseconds, how): the fastest of each product, packed and decoded."""
        mlp = self._mlp
        for name, weight, x, activation in (
            ("gate and up", mlp.gate_up, self._x, mlp.activation),
            ("down", mlp.down, self._active, None),
        ):
            ways: dict[str, GroupedWeight] = {"as stored": weight}
            if isinstance(weight, GroupedPacked):
                ways["in 16 bits"] = weight.in_half(torch.bfloat16)
            for kind, used in ways.items():
                lines = sorted(self._candidates(used, x, activation), key=lambda line: line[0])
                yield from ((f"{name}, {kind}", time, how) for time, how in lines[:_LISTED])

    def _candidates(self, weight: GroupedWeight, x: Tensor, activation: str | None) -> Iterator[tuple[float, str]]:
        wanted = None
        for tile, config in candidates(weight, self._pairs, self._experts):
            routes = self._routes(tile, config.splits)
            try:
                found = weight.matmul(x, routes[0], config, activation, self._mlp.clip)
                wanted = found if wanted is None else wanted
                if relative_error(found, wanted) < _LARGEST_ERROR:
                    yield self._product(weight, x, routes, config, activation), f"tiles of {tile}, {config}"
            except Exception as error:  # too much shared memory on this GPU, for one
                print(f"does not run here: tiles of {tile}, {config} ({type(error).__name__})")

    def _routes(self, tile: int, splits: int) -> list[Routes]:
        """Listed where a layer would list them, too."""
        routes = [route(logits, self._mlp.rule, tile) for logits in self._logits]
        few = can_stay_unlisted(len(self._x), self._mlp.rule.per_token, tile, splits)
        return [found.unlisted if few else found for found in routes]

    def _product(
        self, weight: GroupedWeight, x: Tensor, routes: list[Routes], config: TileConfig, activation: str | None
    ) -> float:
        return self._time(lambda number: weight.matmul(x, routes[number], config, activation, self._mlp.clip))

    def _time(self, call: Callable[[int], Any]) -> float:
        return microseconds([partial(call, number) for number in range(_CALLS)])


def describe(way: Way) -> str:
    first = "decoded first, " if way.decoded else ""
    return f"{first}tiles of {way.tile}; gate and up {way.gate_up}; down {way.down}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="quantkit.eval.kernels.experts")
    parser.add_argument("--shape", choices=EXPERT_SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--format", default="w4", help="w4, mxfp4, fp8, bf16 or another of `quantkit bench kernels`")
    parser.add_argument("--tokens", default="1,8,32,256,8192")
    parser.add_argument("--tried", action="store_true", help="every candidate too")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("quantkit: this needs a CUDA device")
    mlp = layer_of(given.shape, given.format, torch.device("cuda"))
    for tokens in map(int, given.tokens.split(",")):
        timed = Timed(mlp, tokens)
        print(f"{given.shape} {given.format}, {tokens} tokens: {describe(timed.way)}")
        for what, time in timed.launches():
            print(f"  {what:<26}{time:10.1f} us")
        for what, time, how in timed.tried() if given.tried else ():
            print(f"  {what:<26}{time:10.1f} us  {how}", flush=True)


if __name__ == "__main__":
    main()
