"""What kernels over rows of numbers share: places along a row, sums, and arguments that are floats."""

from __future__ import annotations

import struct
from collections.abc import Callable

from quantkit.kernels.cpu.language import F32, I32, I64, Code, Value

LANES = 16


def along(code: Code, count: Value, body: Callable[[Value, int], None]) -> None:
    """`body(place, lanes)` for all places of a row: 16 at a time, then one by one."""
    whole = (count >> 4) << 4
    with code.loop(0, whole, LANES) as place:
        body(place, LANES)
    with code.loop(whole, count) as place:
        body(place, 1)


def sum_along(code: Code, count: Value, values: Callable[[Value, int], Value]) -> Value:
    """The sum of `values(place, lanes)` over a row."""
    sums = {lanes: code.variable(code.constant(F32.x(lanes), 0.0)) for lanes in (LANES, 1)}
    along(code, count, lambda place, lanes: sums[lanes].set(sums[lanes].get() + values(place, lanes)))
    return total(sums[LANES].get()) + sums[1].get().at(0)


def total(values: Value) -> Value:
    """The sum of all lanes, in pairs."""
    while values.type.lanes > 1:
        half = values.type.lanes // 2
        values = values.cut(0, half) + values.cut(half, half)
    return values.at(0)


def exp(code: Code, x: Value) -> Value:
    """e^x of float32, to one part in 10^7: 2^n by its bits times a polynomial of what is left; 0 below e^-87."""
    power = x * 1.4426950408889634
    whole = code.of_each("rint", power)
    rest = power - whole
    value = code.constant(x.type, _POWERS[0])
    for factor in _POWERS[1:]:
        value = code.fma(value, rest, code.constant(x.type, factor))
    limit = code.constant(x.type, -126.0)
    exponent = code.of_each("maximum", code.of_each("minimum", whole, code.constant(x.type, 127.0)), limit)
    scale = ((exponent.to(I32) + 127) << 23).view(x.type)
    return code.select(x < -87.0, code.constant(x.type, 0.0), value * scale)


# ln(2)^k / k!, the highest first
_POWERS = (1.5252734e-5, 1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)


def as_argument(number: float) -> int:
    """A float in the place of an integer; `load_argument` reads it."""
    return int.from_bytes(struct.pack("<fi", number, 0), "little")


def load_argument(code: Code, arguments: Value, place: int) -> Value:
    return code.load(F32, arguments, 2 * place)


def load_integers(code: Code, arguments: Value, count: int) -> list[Value]:
    return [code.load(I64, arguments, place) for place in range(count)]
