"""The largest logit of every row on a CPU, and its log-probability; meaning as `reference.sampling.greedy` has it."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.floats import load_floats
from quantkit.kernels.cpu.language import F32, I32, I64, Code, Value
from quantkit.kernels.cpu.pool import shared_pool
from quantkit.kernels.cpu.rows import LANES, along, exp, load_integers, sum_along

_NO_PLACE = (1 << 31) - 1


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """int64 and float32 [rows]; -1 and NaN for rows with NaN or +Inf."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    arguments = [logits.data_ptr(), logits.stride(0), vocab, tokens.data_ptr(), logprobs.data_ptr()]
    shared_pool().run(_kernel(logits.dtype), arguments, rows)
    return tokens, logprobs


@cache
def _kernel(dtype: torch.dtype) -> int:
    return compiled("greedy", 3, partial(_choose, dtype=dtype))


def _choose(code: Code, arguments: Value, first: Value, last: Value, *, dtype: torch.dtype) -> None:
    logits, stride, vocab, tokens, logprobs = load_integers(code, arguments, 5)
    with code.loop(first, last) as row:
        source = logits + row * stride * dtype.itemsize
        top, place = _largest(code, dtype, source, vocab)
        usable = top < float("inf")  # NaN is not
        code.store(code.select(usable, place.to(I64), code.constant(I64, -1)), tokens, row)

        def weight(place: Value, lanes: int, source: Value = source, top: Value = top) -> Value:
            return exp(code, load_floats(code, dtype, lanes, source, place) - top.splat(lanes))

        weights = sum_along(code, vocab, weight)
        chance = code.constant(F32, 0.0) - code.of_each("log", weights)
        nothing = top.equals(float("-inf"))
        chance = code.select(nothing, code.constant(F32, float("-inf")), chance)
        code.store(code.select(usable, chance, code.constant(F32, float("nan"))), logprobs, row)


def _largest(code: Code, dtype: torch.dtype, source: Value, vocab: Value) -> tuple[Value, Value]:
    """The largest of a row, NaN where one is, and its first place."""
    sizes = (LANES, 1)
    tops = {lanes: code.variable(code.constant(F32.x(lanes), float("-inf"))) for lanes in sizes}  # NaN stays
    best = {lanes: code.variable(code.constant(F32.x(lanes), float("-inf"))) for lanes in sizes}
    places = {lanes: code.variable(code.constant(I32.x(lanes), list(range(lanes)))) for lanes in sizes}

    def look(place: Value, lanes: int) -> None:
        values = load_floats(code, dtype, lanes, source, place)
        tops[lanes].set(code.of_each("maximum", tops[lanes].get(), values))
        better = best[lanes].get() < values
        best[lanes].set(code.select(better, values, best[lanes].get()))
        here = place.to(I32).splat(lanes) + code.constant(I32.x(lanes), list(range(lanes)))
        places[lanes].set(code.select(better, here, places[lanes].get()))

    along(code, vocab, look)
    top = code.of_each("maximum", code.over_lanes("fmaximum", tops[LANES].get()), tops[1].get().at(0))
    found = code.constant(I32, _NO_PLACE)
    for lanes in sizes:
        is_top = best[lanes].get().equals(top.splat(lanes))
        at = code.select(is_top, places[lanes].get(), code.constant(I32.x(lanes), _NO_PLACE))
        found = code.of_each("smin", found, code.over_lanes("smin", at))
    return top, found
