"""Tokens in one digit of 8 bits with one scale each, as formats that round their inputs mean it. The result is as in
`activations.py`, with a token's scale in all of its blocks.

W8A8 rounds all inputs. LLM.int8 looks at them in float16 and leaves out the columns in which any token has an outlier:
they are zeros here, and `product.py` adds what they give.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.kernels.cpu.activations import LANES, Digits, load_inputs, room_for
from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.floats import load_floats, rounded, size_of
from quantkit.kernels.cpu.language import F32, I8, I32, I64, Code, Value
from quantkit.kernels.cpu.pool import Pool
from quantkit.kernels.cpu.rows import along, as_argument, load_argument, load_integers

HEAD = 4  # numbers: how many outlier columns there are, where they are listed, x, its stride


class Outliers(NamedTuple):
    """Columns that are multiplied as they are: addresses in one piece of memory, which lives as long as this does."""

    head: int  # int64 [HEAD], which `product.py` reads
    largest: int  # float32 [inputs]: the largest size in a column
    threshold: float
    memory: Tensor


def find_outliers(pool: Pool, x: Tensor, threshold: float, inputs: int) -> Outliers:
    """Columns in which a size is at least the threshold, where that is not 0; x padded to so many inputs."""
    memory = torch.empty(HEAD + inputs, dtype=torch.int64)
    head = memory.data_ptr()
    columns = head + 8 * HEAD
    largest = columns + 4 * inputs
    threshold = threshold or float("inf")
    arguments = [x.data_ptr(), x.stride(0), *x.shape, head, columns, largest, as_argument(threshold)]
    pool.run(_finding(x.dtype), arguments, 1)
    return Outliers(head, largest, threshold, memory)


def in_one_digit(pool: Pool, x: Tensor, outliers: Outliers | None, block: int, tokens: int, inputs: int) -> Digits:
    """Arguments and result as those of `activations.in_digits`; without outliers as in W8A8, with them LLM.int8."""
    held = room_for(x, 1, block, tokens, inputs)
    arguments = [x.data_ptr(), x.stride(0), x.shape[1], held.values, inputs, held.scales, held.sums, inputs // block]
    arguments += [0, 0] if outliers is None else [outliers.largest, as_argument(outliers.threshold)]
    pool.run(_rounding(x.dtype, block, outliers is not None), arguments, x.shape[0])
    return held


def rounded_floats(pool: Pool, x: Tensor, threshold: float | None, inputs: int) -> Tensor:
    """What the same digits stand for, outliers as they are: float32 [tokens, inputs], as many as asked."""
    tokens = x.shape[0]
    values = torch.empty(tokens, inputs)
    arguments = [x.data_ptr(), x.stride(0), x.shape[1], values.data_ptr(), inputs]
    outliers = None if threshold is None else find_outliers(pool, x, threshold, inputs)
    arguments += [0, 0] if outliers is None else [outliers.largest, as_argument(outliers.threshold)]
    pool.run(_rounding_floats(x.dtype, outliers is not None), arguments, tokens)
    return values


@cache
def _finding(dtype: torch.dtype) -> int:
    return compiled("outliers", 3, partial(_find, dtype=dtype))


@cache
def _rounding(dtype: torch.dtype, block: int, outliers: bool) -> int:
    return compiled("token_digits", 3, partial(_round_tokens, dtype=dtype, block=block, outliers=outliers))


@cache
def _rounding_floats(dtype: torch.dtype, outliers: bool) -> int:
    return compiled("token_floats", 3, partial(_round_floats, dtype=dtype, outliers=outliers))


def _find(code: Code, arguments: Value, first: Value, last: Value, *, dtype: torch.dtype) -> None:
    x, stride, tokens, inputs, head, columns, largest = load_integers(code, arguments, 7)
    threshold = load_argument(code, arguments, 7)
    count = code.variable(code.constant(I64, 0))

    def look(place: Value, lanes: int) -> None:
        most = code.variable(code.constant(I32.x(lanes), 0))
        with code.loop(0, tokens) as token:
            size = size_of(load_floats(code, dtype, lanes, x, token * stride + place))
            most.set(code.larger(most.get(), size))
        found = rounded(code, torch.float16, most.get().view(F32.x(lanes)))  # the largest of rounded ones, too
        code.store(found, largest, place)
        top = found.at(0) if lanes == 1 else code.over_lanes("fmaximum", found)
        small = top < threshold
        with code.when(small.equals(0)), code.loop(place, place + lanes) as column:
            size = code.load(F32, largest, column)
            with code.when((size < threshold).equals(0)):
                code.store(column.to(I32), columns, count.get())
                count.set(count.get() + 1)

    along(code, inputs, look)
    for number, value in enumerate((count.get(), columns, x, stride)):
        code.store(value, head, number)


def _round_tokens(
    code: Code, arguments: Value, first: Value, last: Value, *, dtype: torch.dtype, block: int, outliers: bool
) -> None:
    x, stride, inputs, values, padded, scales, sums, blocks, largest = load_integers(code, arguments, 9)
    columns = _Columns(code, largest, load_argument(code, arguments, 9)) if outliers else None
    with code.loop(first, last) as token:
        row = _Row(code, dtype, x + token * stride * dtype.itemsize, inputs, columns)
        scale, digits_of = row.rounding(padded)
        with code.loop(0, blocks) as number:
            total = code.constant(I32.x(LANES), 0)
            for offset in range(0, block, LANES):
                start = number * block + offset
                digit = digits_of(row.at(start))
                total = total + digit
                code.store(digit.to(I8), values, token * padded + start)
            at = token * blocks + number
            code.store(scale, scales, at)
            code.store(code.over_lanes("add", total), sums, at)


def _round_floats(
    code: Code, arguments: Value, first: Value, last: Value, *, dtype: torch.dtype, outliers: bool
) -> None:
    x, stride, inputs, values, padded, largest = load_integers(code, arguments, 6)
    columns = _Columns(code, largest, load_argument(code, arguments, 6)) if outliers else None
    with code.loop(first, last) as token:
        row = _Row(code, dtype, x + token * stride * dtype.itemsize, inputs, columns)
        scale, digits_of = row.rounding(padded)
        with code.loop(0, padded, LANES) as place:
            value = digits_of(row.at(place)).to(F32) * scale.splat(LANES)
            if columns is not None:
                value = code.select(columns.fit(place), value, load_inputs(code, dtype, row.address, place, inputs))
            code.store(value, values, token * padded + place)


class _Columns(NamedTuple):
    """Which of them have outliers."""

    code: Code
    largest: Value
    threshold: Value

    def fit(self, place: Value) -> Value:
        """Whether 16 of them have none."""
        return self.code.load(F32.x(LANES), self.largest, place) < self.threshold.splat(LANES)


class _Row(NamedTuple):
    """The inputs of a token."""

    code: Code
    dtype: torch.dtype
    address: Value
    inputs: Value
    columns: _Columns | None

    def at(self, place: Value) -> Value:
        """16 of those that are rounded, zeros for outliers and after the last."""
        part = self._exact(place)
        return part if self.columns is None else rounded(self.code, torch.float16, part)

    def _exact(self, place: Value) -> Value:
        part = load_inputs(self.code, self.dtype, self.address, place, self.inputs)
        if self.columns is None:
            return part
        return self.code.select(self.columns.fit(place), part, self.code.constant(part.type, 0.0))

    def rounding(self, padded: Value) -> tuple[Value, Callable[[Value], Value]]:
        """The scale of the token, and how its inputs become digits."""
        code, most = self.code, self.code.variable(self.code.constant(I32.x(LANES), 0))
        with code.loop(0, padded, LANES) as place:
            most.set(code.larger(most.get(), size_of(self._exact(place))))
        largest = code.over_lanes("smax", most.get()).splat(1).view(F32.x(1))
        if self.columns is not None:
            largest = rounded(code, torch.float16, largest)
        return _scale(code, largest.at(0), self.columns is not None)


def _scale(code: Code, most: Value, outliers: bool) -> tuple[Value, Callable[[Value], Value]]:
    """Of a token with this largest size, and how its inputs become digits."""
    if outliers:
        least = code.constant(F32, 1e-30)
        factor = (code.constant(F32, 1.0) // code.of_each("maximum", most, least)) * 127.0  # as torch divides a number
        scale = most // code.constant(F32, 127.0)
        return scale, lambda part: code.of_each("rint", part * factor.splat(LANES)).to(I32)
    one = code.constant(F32, 1.0)
    scale = code.select(most.equals(0.0), one, most) // code.constant(F32, 127.5)

    def digits_of(part: Value) -> Value:
        low, high = (code.constant(part.type, limit) for limit in (-128.0, 127.0))
        fitting = code.of_each("minimum", code.of_each("maximum", part // scale.splat(LANES), low), high)
        return code.of_each("rint", fitting).to(I32)

    return scale, digits_of
