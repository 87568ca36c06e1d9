"""y = x @ weight.T + bias for a weight of floats in 16 or 8 bits, widened in registers and multiplied in float32.

The weight lies in rows, as a checkpoint has it, so an embedding can be an output layer without a copy. A thread has a
few outputs at a time. It reads their rows from left to right with the same inputs of a few tokens, and adds up the
lanes at the end. Weights of 8 bits have scales for groups of inputs, and x may have scales for the same groups.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch

from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.float8 import QUADS, RAISED_UNIT, load_float8, quads_of
from quantkit.kernels.cpu.floats import load_floats, store_floats
from quantkit.kernels.cpu.language import F32, I32, I64, Code, Value, Variable
from quantkit.kernels.cpu.processor import Processor
from quantkit.kernels.cpu.rows import total


class Arguments(NamedTuple):
    """Addresses and sizes, in their order."""

    weight: Value  # [outputs, inputs], contiguous
    scales: Value  # float32 [outputs, groups], of 8 bits
    x: Value  # float32 (float16 in `float8_product.py`) [tokens, inputs], contiguous
    x_scales: Value  # float32 [tokens, groups], where x has them
    bias: Value  # 0: none
    y: Value  # [tokens, outputs], rows contiguous
    y_stride: Value
    tokens: Value
    outputs: Value
    inputs: Value
    groups: Value  # 1 where there are no scales
    each: Value  # outputs of a piece of work, whole turns


class Kind(NamedTuple):
    """What kernels are compiled for. Where the weight has 8 bits, x is raised (`float8.py`)."""

    stored: torch.dtype  # of the weight
    dtype: torch.dtype  # of y and bias
    tokens: int  # at a time
    x_scaled: bool = False

    @property
    def scaled(self) -> bool:
        return self.stored == torch.float8_e4m3fn

    def rows(self, processor: Processor) -> int:
        """One token reads one row after the other, as memory likes best. Else as many as registers hold sums for, four
        tokens each: there are half as many vectors of 32 bytes. Of 8 bits, which take instructions to be read, only one
        unless vectors have 64 bytes: four then wait less for each other's sums, with one token, too."""
        if self.scaled:
            return 4 if processor.vector == 64 else 1
        return 1 if self.tokens == 1 else 2 if processor.vector == 32 else 4


class Turn(NamedTuple):
    """What is read together."""

    rows: list[Value]
    tokens: list[Value]


@cache
def kernel(kind: Kind) -> int:
    return compiled("float_product", 3, partial(multiply, kind=kind))


def pieces(outputs: int, threads: int, rows: int) -> tuple[int, int]:
    """Outputs of a piece, whole turns of so many rows, and how many pieces there are: several for each thread."""
    each = max(1, outputs // (8 * threads * rows)) * rows
    return each, -(-outputs // each)


def multiply(code: Code, arguments: Value, first: Value, last: Value, *, kind: Kind) -> None:
    held = Arguments(*(code.load(I64, arguments, place) for place in range(len(Arguments._fields))))
    rows, end = kind.rows(code.processor), last * held.each
    with (
        code.loop(first * held.each, code.smaller(end, held.outputs), rows) as row,
        code.loop(0, held.tokens, kind.tokens) as token,
    ):
        turn = Turn(places(code, row, rows, held.outputs), places(code, token, kind.tokens, held.tokens))
        sums = _sums(code, held, kind, turn)
        for (output, place), value in zip(product(turn.rows, turn.tokens), sums, strict=True):
            store(code, held, kind.dtype, place, output, value)


def places(code: Code, start: Value, count: int, end: Value) -> list[Value]:
    """So many from the start on; at the end the last one again, which is read, computed and stored once more."""
    counted = (start + number for number in range(count))
    return [code.select(place < end, place, end - 1) for place in counted]


def _sums(code: Code, held: Arguments, kind: Kind, turn: Turn) -> list[Value]:
    """One number for each row and token."""
    sums = _Sums.begun(code, kind, turn)
    if not kind.scaled:
        _add_group(code, held, kind, turn, (code.constant(I64, 0), held.inputs), sums)
        return sums.totals()
    totals, group = _Sums.begun(code, kind, turn), held.inputs // held.groups
    with code.loop(0, held.groups) as number:
        sums.clear(code)
        _add_group(code, held, kind, turn, (number * group, (number + 1) * group), sums)
        for place, (row, token) in enumerate(product(*turn)):
            factor = code.load(F32, held.scales, row * held.groups + number) * RAISED_UNIT
            if kind.x_scaled:
                factor = factor * code.load(F32, held.x_scales, token * held.groups + number)
            totals.add_scaled(code, place, sums, factor)
    return totals.totals()


class _Sums(NamedTuple):
    """For each row and token one over many inputs at a time, and one over single inputs."""

    many: list[Variable]
    single: list[Variable]

    @classmethod
    def begun(cls, code: Code, kind: Kind, turn: Turn) -> _Sums:
        if kind.scaled:
            lanes = QUADS if len(turn.rows) * len(turn.tokens) == 1 else QUADS // 4
        else:
            lanes = max(32 if kind.tokens == 1 else 16 // kind.tokens, code.processor.vector // 4)
        pairs = list(product(*turn))
        return cls(*([code.variable(code.constant(F32.x(count), 0.0)) for _ in pairs] for count in (lanes, 1)))

    def clear(self, code: Code) -> None:
        for part in (*self.many, *self.single):
            part.set(code.constant(part.type, 0.0))

    def add_scaled(self, code: Code, place: int, other: _Sums, factor: Value) -> None:
        """Lanes are added up once, at the end."""
        for own, part in ((self.many[place], other.many[place]), (self.single[place], other.single[place])):
            own.set(code.fma(part.get(), factor.splat(own.type.lanes), own.get()))

    def totals(self) -> list[Value]:
        return [total(many.get()) + one.get().at(0) for many, one in zip(self.many, self.single, strict=True)]


def _add_group(code: Code, held: Arguments, kind: Kind, turn: Turn, inputs: tuple[Value, Value], sums: _Sums) -> None:
    """Over some of the inputs: many at a time, then one by one."""

    def add(place: Value, weights: list[Value], some: list[Variable], step: int) -> None:
        lanes = some[0].type.lanes
        for offset in range(0, step, lanes):
            x = [code.load(F32.x(lanes), held.x, token * held.inputs + place + offset) for token in turn.tokens]
            of_token = iter(some)
            for weight in weights[offset // lanes :: step // lanes]:
                for values in x:
                    value = next(of_token)
                    value.set(code.fma(weight, values, value.get()))

    (start, stop), lanes = inputs, sums.many[0].type.lanes
    step = QUADS if kind.scaled else lanes
    whole = start + (stop - start) // step * step
    with code.loop(start, whole, step) as place:
        if len(turn.rows) > 1:  # several rows are no stream that a processor would see ahead of
            for row in turn.rows:
                code.ask(held.weight + ((row + len(turn.rows)) * held.inputs + place) * kind.stored.itemsize)
        weights = [part for row in turn.rows for part in _load_many(code, held, kind, row * held.inputs + place, lanes)]
        add(place, weights, sums.many, step)
    with code.loop(whole, stop) as place:
        weights = [_load_one(code, held, kind, row * held.inputs + place) for row in turn.rows]
        add(place, weights, sums.single, 1)


def _load_many(code: Code, held: Arguments, kind: Kind, place: Value, lanes: int) -> list[Value]:
    """Of a row as many as are read together, in vectors of so many lanes."""
    if not kind.scaled:
        return [load_floats(code, kind.stored, lanes, held.weight, place)]
    quads = quads_of(code.load(I32.x(QUADS // 4), held.weight + place))
    return [code.join(quads)] if lanes == QUADS else quads


def _load_one(code: Code, held: Arguments, kind: Kind, place: Value) -> Value:
    if kind.scaled:
        return load_float8(code, 1, held.weight, place)
    return load_floats(code, kind.stored, 1, held.weight, place)


def store(code: Code, held: Arguments, dtype: torch.dtype, token: Value, output: Value, value: Value) -> None:
    """One number of y, with its bias."""
    result = code.variable(value.splat(1))
    with code.when(code.constant(I64, 0) < held.bias):
        result.set(result.get() + load_floats(code, dtype, 1, held.bias, output))
    store_floats(code, dtype, result.get(), held.y, token * held.y_stride + output)
