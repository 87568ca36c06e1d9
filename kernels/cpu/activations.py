"""Activations as whole numbers with one scale a block: `x = scale * (256 * first + second)`, in one to three digits.

One digit of 8 bits is what other programs for CPUs multiply with. Two lose less than rounding to 16 bits does, three as
little as float32 itself; where reading the weight takes longer than multiplying, they cost little.

    values  int8 [digits, tokens, inputs]   inputs padded to whole blocks with zeros
    scales  float32 [tokens, blocks]        of the last digit; some neighbours may have one in common
    sums    int32 [digits, tokens, blocks]  of each digit, for zero points

What is not finite makes its block's scale so, and with it every result that reads the block.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.floats import load_floats
from quantkit.kernels.cpu.language import F32, I8, I32, I64, Code, Value
from quantkit.kernels.cpu.pool import Pool

LANES = 16
_LARGEST = {1: 127.0, 2: 127.0 * 256, 3: 127.0 * 256 * 256}  # what is rounded up from there still fits


class Digits(NamedTuple):
    """Where they are: addresses in one piece of memory, which lives as long as this does."""

    values: int
    scales: int
    sums: int
    memory: Tensor


def in_digits(pool: Pool, x: Tensor, digits: int, block: int, tokens: int, inputs: int, shared: int = 1) -> Digits:
    """x [some tokens, some inputs], rows contiguous; the result has as many tokens and inputs as asked, zeros there.
    So many blocks have a common scale, which stands at each of them."""
    held = room_for(x, digits, block, tokens, inputs)
    arguments = [x.data_ptr(), x.stride(0), x.shape[1], held.values, tokens, inputs, held.scales, held.sums]
    pool.run(_kernel(x.dtype, digits, block, shared), [*arguments, inputs // block], x.shape[0])
    return held


def room_for(x: Tensor, digits: int, block: int, tokens: int, inputs: int) -> Digits:
    """Memory for the digits of x; zeros where there are more tokens than x has."""
    numbers = tokens * (inputs // block)  # of scales, and of the sums of a digit
    fill = torch.zeros if tokens > x.shape[0] else torch.empty
    memory = fill(digits * tokens * inputs + 4 * (1 + digits) * numbers, dtype=torch.int8)
    values = memory.data_ptr()
    scales = values + digits * tokens * inputs
    return Digits(values, scales, scales + 4 * numbers, memory)


@cache
def _kernel(dtype: torch.dtype, digits: int, block: int, shared: int) -> int:
    return compiled("digits", 3, partial(_round_tokens, dtype=dtype, digits=digits, block=block, shared=shared))


def _round_tokens(
    code: Code,
    arguments: Value,
    first: Value,
    last: Value,
    *,
    dtype: torch.dtype,
    digits: int,
    block: int,
    shared: int,
) -> None:
    x, stride, inputs, values, tokens, padded, scales, all_sums, blocks = (
        code.load(I64, arguments, place) for place in range(9)
    )
    with code.loop(first, last) as token, code.loop(0, blocks, shared) as start:
        row, offsets = x + token * stride * dtype.itemsize, range(0, shared * block, LANES)
        parts = [load_inputs(code, dtype, row, start * block + offset, inputs) for offset in offsets]
        scale, factor = _scale(code, parts, _LARGEST[digits])
        for number in range(shared):
            sums, at = [code.constant(I32.x(LANES), 0) for _ in range(digits)], token * blocks + start + number
            code.store(scale, scales, at)
            for offset in range(number * block, (number + 1) * block, LANES):
                whole = code.of_each("rint", parts[offset // LANES] * factor.splat(LANES)).to(I32)
                for place, digit in enumerate(_cut(whole, digits)):
                    sums[place] = sums[place] + digit
                    code.store(digit.to(I8), values, (tokens * place + token) * padded + start * block + offset)
            for place, total in enumerate(sums):
                code.store(code.over_lanes("add", total), all_sums, tokens * blocks * place + at)


def load_inputs(code: Code, dtype: torch.dtype, row: Value, place: Value, inputs: Value) -> Value:
    """16 inputs from a place on; zeros behind the last."""
    part = code.variable(code.constant(F32.x(LANES), 0.0))
    with code.when(place + LANES < inputs + 1):
        part.set(load_floats(code, dtype, LANES, row, place))
    with code.when((place < inputs) & (inputs < place + LANES)), code.loop(place, inputs) as one:
        part.set(part.get().put(load_floats(code, dtype, 1, row, one).at(0), one - place))
    return part.get()


def _scale(code: Code, parts: list[Value], largest: float) -> tuple[Value, Value]:
    """Of a block, and what its values are multiplied with; 0 and 0 where all are 0."""
    sizes = [code.of_each("fabs", part) for part in parts]
    while len(sizes) > 1:
        sizes = [code.of_each("maximum", sizes[0], sizes[1]), *sizes[2:]]
    most = code.over_lanes("fmaximum", sizes[0])
    nothing, zero = most < 1e-30, code.constant(F32, 0.0)
    factor = code.constant(F32, largest) // most
    return code.select(nothing, zero, most * (1 / largest)), code.select(nothing, zero, factor)


def _cut(whole: Value, digits: int) -> list[Value]:
    """From the first on; each is the nearest to what it and those behind it say."""
    cut: list[Value] = []
    for _ in range(digits - 1):
        rest = (whole + 128).signed_shift(8)
        cut.append(whole - (rest << 8))
        whole = rest
    return [whole, *reversed(cut)]
