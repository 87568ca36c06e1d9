"""Float8 e4m3 on a CPU: read as float32, and tokens rounded to it.

The bits of a float8, put where a float32 has its sign, the end of its exponent and the beginning of its mantissa, mean
2^-120 times the same number, also where it has no leading one. `load_float8` leaves it so: one factor of a sum of
products costs nothing. So that products stay far from the smallest floats, what they are multiplied with is raised.

64 float8 are read as 16 words of four (`quads_of`): a shift brings a byte of each to its place, while single bytes must
be widened first. Tokens that are multiplied with them lie in the same order: first what stands beside the first
byte of each word, then beside the second (`store_in_quads`), as far as there are 64 inputs.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.floats import load_floats, size_of, upper_halves
from quantkit.kernels.cpu.language import F16, F32, I8, I16, I32, Code, Value
from quantkit.kernels.cpu.pool import shared_pool
from quantkit.kernels.cpu.rows import LANES, along, as_argument, load_argument, load_integers

RAISED = 2.0**64
RAISED_UNIT = 2.0**120 / RAISED  # what a product of a raised number and a `load_float8` counts
LOWERED = 2.0**-4  # what float16 of tokens are held times: of products in float16, 256 add up to less than 2^14
QUADS = 64  # float8 that are read together
_LARGEST = 448.0
_EXPONENT_OF_SMALLEST = (127 - 6) << 23  # of float8 with a leading one, in the bits of a float32
_MUCH_LARGER = (20 << 23) + (1 << 22)  # added to an exponent: one and a half times 2^20


def load_float8(code: Code, lanes: int, address: Value, place: Value) -> Value:
    """Times 2^-120, as float32."""
    halves = (code.load(I8.x(lanes), address, place).to(I16) << 4) & 0x87F0
    return upper_halves(code, halves)


def quads_of(words: Value) -> list[Value]:
    """Of four float8 in each of 16 words: one of each, the next of each ... times 2^-120, as float32."""
    shifted = [words << (24 - 8 * place) if place < 3 else words for place in range(4)]
    return [(bits.signed_shift(4) & 0x87F00000).view(F32.x(words.type.lanes)) for bits in shifted]


def store_in_quads(code: Code, values: Value, address: Value, place: Value, whole: Value) -> None:
    """Some neighbours, up to `whole` in the order of `quads_of`, then as they are."""
    if values.type.lanes == 1:
        code.store(values, address, place)
        return
    with code.when(place < whole):
        for number in range(4):
            start = (place & ~(QUADS - 1)) + LANES * number + ((place & (QUADS - 1)) >> 2)
            code.store(values.pick(range(number, LANES, 4)), address, start)
    with code.when(whole < place + 1):
        code.store(values, address, place)


def round_tokens(x: Tensor, groups: int, scale: float | None, *, halves: bool = False) -> tuple[Tensor, Tensor]:
    """x [tokens, inputs] in float8, and scales [tokens, groups]: those given, or the smallest. The float8 are held as
    raised float32 in quads, or as lowered float16."""
    return _rounded(x, groups, scale, "lowered" if halves else "raised")


def rounded_tokens(x: Tensor, groups: int, scale: float | None, *, raised: bool = False) -> Tensor:
    """The same times their scales, float32: what the float8 stand for; raised or not, in their order."""
    return _rounded(x, groups, scale, "scaled and raised" if raised else "scaled")[0]


def _rounded(x: Tensor, groups: int, scale: float | None, held: str) -> tuple[Tensor, Tensor]:
    values = torch.empty(x.shape, dtype=torch.float16 if held == "lowered" else torch.float32)
    scales = torch.empty(x.shape[0], groups)
    arguments = [x.data_ptr(), x.stride(0), x.shape[1], groups, values.data_ptr(), scales.data_ptr()]
    arguments.append(as_argument(scale or 0.0))
    shared_pool().run(_rounding(x.dtype, scale is not None, held), arguments, x.shape[0])
    return values, scales


def widen(values: Tensor, scales: Tensor) -> Tensor:
    """Float32 [rows, inputs] of float8 and their scales [rows, groups]."""
    wide = torch.empty(values.shape)
    arguments = [values.data_ptr(), scales.data_ptr(), wide.data_ptr(), values.shape[1], scales.shape[1]]
    shared_pool().run(_widening(), arguments, len(values))
    return wide


def raised(x: Tensor) -> Tensor:
    """x [tokens, inputs] as raised float32 in quads, not rounded."""
    x = x if x.stride(1) == 1 else x.contiguous()
    values = torch.empty(x.shape)
    shared_pool().run(_raising(x.dtype), [x.data_ptr(), x.stride(0), x.shape[1], values.data_ptr()], x.shape[0])
    return values


@cache
def _raising(dtype: torch.dtype) -> int:
    return compiled("raise", 3, partial(_raise, dtype=dtype))


@cache
def _rounding(dtype: torch.dtype, given: bool, held: str) -> int:
    return compiled("round_float8", 3, partial(_round, dtype=dtype, given=given, held=held))


@cache
def _widening() -> int:
    return compiled("widen_float8", 3, _widen)


def _round(
    code: Code, arguments: Value, first: Value, last: Value, *, dtype: torch.dtype, given: bool, held: str
) -> None:
    x, stride, inputs, groups, values, scales = load_integers(code, arguments, 6)
    size = inputs // groups
    with code.loop(first, last) as token, code.loop(0, groups) as group:
        source = x + (token * stride + group * size) * dtype.itemsize
        target = values + (token * inputs + group * size) * (2 if held == "lowered" else 4)
        scale = load_argument(code, arguments, 6) if given else _scale(code, dtype, source, size)
        code.store(scale, scales, token * groups + group)

        def write(place: Value, lanes: int, source: Value = source, to: Value = target, scale: Value = scale) -> None:
            value = rounded(code, load_floats(code, dtype, lanes, source, place) // scale.splat(lanes))
            if held == "raised":
                store_in_quads(code, value * RAISED, to, place, size // QUADS * QUADS)
            else:
                counted = (scale * RAISED if held == "scaled and raised" else scale).splat(lanes)
                kept = (value * LOWERED).to(F16) if held == "lowered" else value * counted
                code.store(kept, to, place)

        along(code, size, write)


def _raise(code: Code, arguments: Value, first: Value, last: Value, *, dtype: torch.dtype) -> None:
    x, stride, inputs, values = load_integers(code, arguments, 4)
    with code.loop(first, last) as token:

        def write(place: Value, lanes: int, token: Value = token) -> None:
            value = load_floats(code, dtype, lanes, x, token * stride + place) * RAISED
            store_in_quads(code, value, values + token * inputs * 4, place, inputs // QUADS * QUADS)

        along(code, inputs, write)


def _scale(code: Code, dtype: torch.dtype, source: Value, size: Value) -> Value:
    """That brings the largest of some numbers to the largest float8; 1 where all are 0."""
    most = {lanes: code.variable(code.constant(I32.x(lanes), 0)) for lanes in (LANES, 1)}

    def look(place: Value, lanes: int) -> None:
        size = size_of(load_floats(code, dtype, lanes, source, place))
        most[lanes].set(code.larger(most[lanes].get(), size))

    along(code, size, look)
    largest = code.larger(code.over_lanes("smax", most[LANES].get()), most[1].get().at(0)).view(F32)
    return code.select(largest.equals(0.0), code.constant(F32, 1.0), largest // code.constant(F32, _LARGEST))


def rounded(code: Code, value: Value) -> Value:
    """To the nearest float8, ties to even; what is too large becomes the largest."""
    value = code.smaller(value, code.constant(value.type, _LARGEST))
    value = code.larger(value, code.constant(value.type, -_LARGEST))
    # Beside a float 2^20 times as large, three binary digits are left; below 2^-6 there are as many as at 2^-6.
    exponent = value.view(I32.x(value.type.lanes)) & 0x7F800000
    smallest = code.constant(exponent.type, _EXPONENT_OF_SMALLEST)
    beside = (code.larger(exponent, smallest) + _MUCH_LARGER).view(value.type)
    return (value + beside) - beside


def _widen(code: Code, arguments: Value, first: Value, last: Value) -> None:
    values, scales, wide, inputs, groups = load_integers(code, arguments, 5)
    size = inputs // groups
    with code.loop(first, last) as row, code.loop(0, groups) as group:
        scale, start = code.load(F32, scales, row * groups + group), row * inputs + group * size

        def write(place: Value, lanes: int, scale: Value = scale, start: Value = start) -> None:
            value = load_float8(code, lanes, values, start + place) * 2.0**120
            code.store(value * scale.splat(lanes), wide, start + place)

        along(code, size, write)
