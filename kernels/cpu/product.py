"""y = x @ weight.T + bias for a weight of few bits, multiplied as it is stored (`tiles.py`) with x in whole numbers
(`activations.py`).

A thread has 16 outputs at a time. It reads their codes for 32 inputs, makes bytes of them, multiplies those with the
same inputs of several tokens, and goes on; at the end of a block sums of whole numbers become floats. Where x or the
values of a table have several digits, products of digits that count the same are added in one sum. There are as many
sums as the longer of both has digits: products that count less than the last are smaller than what rounding has lost.

Where several groups share an outer scale, sums may stay whole numbers for longer (`small_scales.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quantkit.kernels.cpu.bytes import dot, look_up, signed_byte
from quantkit.kernels.cpu.floats import load_floats, to_stored
from quantkit.kernels.cpu.language import F32, I8, I32, I64, Code, Value, Variable
from quantkit.kernels.cpu.product_kind import Arguments, Kind
from quantkit.kernels.cpu.small_scales import Outer, WholeSums, outer_of, small_of
from quantkit.kernels.cpu.tiles import ROWS

INPUTS = 16  # of a turn: what a vector of x holds everywhere
# Whole numbers up to 2^22 on either side, added to this one's bits, are the float beside it plus that number.
_BITS_OF_MIDDLE, _MIDDLE = 0x4B400000, float(3 << 22)
_MOST_FROM_MIDDLE = 128


def multiply(code: Code, arguments: Value, first: Value, last: Value, *, kind: Kind) -> None:
    held = Arguments(*(code.load(I64, arguments, place) for place in range(len(Arguments._fields))))
    count = (held.outputs + (ROWS - 1)) // ROWS
    end = last * held.tiles
    with (
        code.loop(first * held.tiles, code.smaller(end, count)) as tile,
        code.loop(0, held.tokens, kind.tokens) as token,
        code.loop(0, ROWS, kind.rows) as row,
    ):
        sums = _of_tile(code, held, kind, tile, row, token)
        for number, total in enumerate(sums):
            with code.when(token + number < held.tokens):
                store(code, held, kind.dtype, tile * ROWS + row, token + number, total)


def _of_tile(code: Code, held: Arguments, kind: Kind, tile: Value, row: Value, token: Value) -> list[Value]:
    """Sums of a tile's outputs from `row` on, for each of some tokens."""
    sums = [code.variable(code.constant(F32.x(kind.rows), 0.0)) for _ in range(kind.tokens)]
    codes = code.variable(held.codes + tile * held.inputs * (ROWS * kind.codes.bits // 8) + row * 4)
    with code.loop(0, held.groups, kind.every) as first:
        outer = outer_of(code, held, kind, (tile * held.groups + first) // kind.every * ROWS + row)
        if kind.whole_scales:
            _add_groups(code, held, kind, codes, token, first, tile * held.groups * ROWS + row, outer, sums)
        else:
            with code.loop(first, first + kind.every) as group:
                grid = grid_of(code, held, kind, (tile * held.groups + group) * ROWS + row, outer)
                with code.loop(0, held.blocks) as part:
                    _add_block(code, held, kind, codes, token, group * held.blocks + part, grid, sums)
    if kind.outliers:
        add_outliers(code, held, kind, tile, row, token, sums)
    return [total.get() for total in sums]


class Grid(NamedTuple):
    """What a group's codes stand for, of `Kind.rows` outputs."""

    scales: Value
    zeros: Value | None
    lows: Value | None


def grid_of(code: Code, held: Arguments, kind: Kind, place: Value, outer: Outer) -> Grid:
    zeros = None
    if kind.codes.has_zero_points:
        zeros = code.load(I8.x(kind.rows), held.zeros, place).to(I32, signed=False) - kind.codes.zeros_from
    scales = _scaled(code, kind, kind.scales, held.scales, place, outer[0])
    return Grid(scales, zeros, _scaled(code, kind, kind.lows, held.lows, place, outer[1]) if kind.lows else None)


def _scaled(code: Code, kind: Kind, dtype: torch.dtype, address: Value, place: Value, outer: Value | None) -> Value:
    """Numbers of some outputs, times those that several groups share: they are small whole numbers then."""
    if outer is None:
        return load_floats(code, dtype, kind.rows, address, place)
    return code.load(I8.x(kind.rows), address, place).to(I32).to(F32) * outer


def _add_groups(
    code: Code,
    held: Arguments,
    kind: Kind,
    codes: Variable,
    token: Value,
    first: Value,
    numbers: Value,
    outer: Outer,
    sums: list[Variable],
) -> None:
    """Groups that share an outer scale, in whole numbers; scales of the tile's groups begin at `numbers`."""
    counted = [WholeSums.begun(code, kind) for _ in sums]
    with code.loop(first, first + kind.every) as group:
        small = small_of(code, held, kind, numbers + group * ROWS)
        sums_of_x = digit_sums(code, held, kind, token, group)
        whole = _block_sums(code, held, kind, codes, token, group, kind.codes.offsets(code.processor, 1), sums_of_x)
        for own, (part,), (of_x,) in zip(counted, whole, sums_of_x, strict=True):
            own.add(part, of_x, small)
    for number, (total, own) in enumerate(zip(sums, counted, strict=True)):
        scale = code.load(F32, held.x_scales, (token + number) * held.groups + first)
        total.set(own.scaled(code, kind, total.get(), outer, scale))


def _add_block(
    code: Code,
    held: Arguments,
    kind: Kind,
    codes: Variable,
    token: Value,
    block: Value,
    grid: Grid,
    sums: list[Variable],
) -> None:
    zeros = grid.zeros
    offsets = [zeros if zeros is not None else offset for offset in kind.codes.offsets(code.processor, kind.digits)]
    sums_of_x = digit_sums(code, held, kind, token, block)
    whole = _block_sums(code, held, kind, codes, token, block, offsets, sums_of_x)
    for number, total in enumerate(sums):
        scale = code.load(F32, held.x_scales, (token + number) * held.groups * held.blocks + block)
        total.set(add_scaled(code, kind, grid, total.get(), whole[number], sums_of_x[number], scale))


def _block_sums(
    code: Code,
    held: Arguments,
    kind: Kind,
    codes: Variable,
    token: Value,
    block: Value,
    offsets: Sequence[Value | int],
    sums_of_x: list[list[Value]],
) -> list[list[Value]]:
    """Whole numbers of a block, of each token as many as there are sums."""
    whole = [[code.variable(start) for start in starts(code, kind, offsets, sums)] for sums in sums_of_x]
    with code.loop(0, kind.block, kind.codes.step) as start:
        for turn in range(0, kind.codes.step, INPUTS):
            x = load_x(code, held, kind, token, block, start + turn)
            for quad in range(INPUTS // 4):
                values = quad_of(code, kind, codes.get(), turn // 4 + quad)
                multiply_quad(code, kind, values, quad, x, whole)
        codes.set(codes.get() + kind.codes.step * ROWS * kind.codes.bits // 8)
    return [[part.get() for part in own] for own in whole]


def load_x(code: Code, held: Arguments, kind: Kind, token: Value, block: Value, start: Value) -> list[list[Value]]:
    """16 inputs of some tokens, in quads; digits of each."""
    places = [
        [(held.x_tokens * digit + token + number) * held.inputs + block * kind.block + start
         for digit in range(kind.digits)]
        for number in range(kind.tokens)
    ]  # fmt: skip
    return [[code.load(I8.x(INPUTS), held.x, at).view(I32.x(INPUTS // 4)) for at in digits] for digits in places]


def multiply_quad(
    code: Code, kind: Kind, values: list[Value], quad: int, x: list[list[Value]], sums: list[list[Variable]]
) -> None:
    """Four inputs of some outputs, with the same of every token."""
    for digits, own in zip(x, sums, strict=True):
        same = [digit.pick([quad] * kind.rows).view(I8.x(4 * kind.rows)) for digit in digits]
        multiply_digits(code, kind, values, same, own)


def digit_sums(code: Code, held: Arguments, kind: Kind, token: Value, block: Value) -> list[list[Value]]:
    """Of a block of each of some tokens."""
    blocks = held.groups * held.blocks
    places = [(token + number) * blocks + block for number in range(kind.tokens)]
    return [
        [code.load(I32, held.x_sums, held.x_tokens * blocks * digit + place) for digit in range(kind.digits)]
        for place in places
    ]


def add_scaled(
    code: Code, kind: Kind, grid: Grid, total: Value, sums: list[Value], sums_of_x: list[Value], scale: Value
) -> Value:
    """What a block gives beside what was there: its sums as floats, times the scales of weight and x."""
    total = code.fma(_counted(code, kind, sums), grid.scales * (scale * kind.unit).splat(kind.rows), total)
    if grid.lows is None:
        return total
    return code.fma(grid.lows, (as_float(code, sums_of_x) * scale).splat(kind.rows), total)


def _counted(code: Code, kind: Kind, sums: list[Value]) -> Value:
    """What was added up from `starts` on, as floats."""
    return sums[0].view(F32.x(kind.rows)) - _MIDDLE if _from_middle(code, kind) else as_float(code, sums)


def _from_middle(code: Code, kind: Kind) -> bool:
    """Where that is quicker than to convert whole numbers, and they are small enough: 8 bits times 7, 128 of them."""
    return code.processor.is_arm and kind.sums == 1 and kind.block <= _MOST_FROM_MIDDLE and not kind.whole_scales


def add_outliers(
    code: Code, held: Arguments, kind: Kind, tile: Value, row: Value, token: Value, sums: list[Variable]
) -> None:
    """What columns of x give that are multiplied in floats; tokens beyond the last read it again."""
    count, columns, x, stride = (code.load(I64, held.outliers, place) for place in range(4))
    scales = load_floats(code, kind.scales, kind.rows, held.scales, tile * ROWS + row)
    with code.loop(0, count) as number:
        column = code.load(I32, columns, number).to(I64)
        at = tile * held.inputs * (ROWS // 4) + (column >> 2) * ROWS + row
        quad = code.load(I32.x(kind.rows), held.codes, at)
        weights = signed_byte(code, quad, column & 3).to(F32) * scales
        for place, total in enumerate(sums):
            last = held.tokens - 1
            own = code.select(token + place < last, token + place, last)
            value = load_floats(code, kind.dtype, 1, x, own * stride + column).at(0)
            total.set(code.fma(weights, value.splat(kind.rows), total.get()))


def as_float(code: Code, sums: list[Value]) -> Value:
    """Each counts 256 times the next; two fit 32 bits together."""
    if len(sums) == 2:
        return ((sums[0] << 8) + sums[1]).to(F32)
    total = sums[0].to(F32)
    for part in sums[1:]:
        total = code.fma(total, code.constant(total.type, 256.0), part.to(F32))
    return total


def starts(code: Code, kind: Kind, offsets: Sequence[Value | int], sums: list[Value]) -> list[Value]:
    """What sums of products begin with, so that codes may stand for `code - offset`."""
    none = _BITS_OF_MIDDLE if _from_middle(code, kind) else 0
    starts = [code.constant(I32.x(kind.rows), none) for _ in range(kind.sums)]
    for left, offset in enumerate(offsets):
        for right, total in enumerate(sums):
            if left + right < len(starts) and not (isinstance(offset, int) and offset == 0):
                product = total.splat(kind.rows) * offset
                starts[left + right] = starts[left + right] - product
    return starts


def multiply_digits(code: Code, kind: Kind, values: list[Value], x: list[Value], sums: list[Variable]) -> None:
    for left, value in enumerate(values):
        for right, digit in enumerate(x):
            if left + right < len(sums):
                total = sums[left + right]
                total.set(dot(code, total.get(), value, digit, bits=kind.codes.dot_bits))


def quad_of(code: Code, kind: Kind, address: Value, quad: int) -> list[Value]:
    """The bytes of some outputs and 4 inputs of a step; several where they have digits."""
    value, shift, start = None, 0, 0
    for bits in kind.codes.planes:
        each = 8 // bits  # quads in a vector
        held = code.load(I8.x(4 * kind.rows), address + (start + quad // each * 4 * ROWS))
        part = _bits(held, quad % each * bits, bits)
        value = part if value is None else value | (part << shift)
        shift += bits
        start += kind.codes.step // 4 // each * 4 * ROWS
    assert value is not None
    tables = kind.codes.tables(code.processor, kind.digits)
    return [look_up(code, table, value) for table in tables] or [value]


def _bits(held: Value, low: int, bits: int) -> Value:
    shifted = held >> low if low else held
    return shifted if low + bits == 8 else shifted & ((1 << bits) - 1)


def store(code: Code, held: Arguments, dtype: torch.dtype, start: Value, token: Value, total: Value) -> None:
    """Outputs from `start` on, as many as there are."""
    row, lanes = token * held.y_stride, total.type.lanes
    with code.when(start + lanes < held.outputs + 1):
        _store_some(code, held, dtype, total, row, start)
    with code.when(held.outputs < start + lanes), code.loop(start, held.outputs) as output:
        _store_some(code, held, dtype, total.at(output - start).splat(1), row, output)


def _store_some(code: Code, held: Arguments, dtype: torch.dtype, values: Value, row: Value, output: Value) -> None:
    result = code.variable(values)
    with code.when(code.constant(I64, 0) < held.bias):
        result.set(values + load_floats(code, dtype, values.type.lanes, held.bias, output))
    code.store(to_stored(code, dtype, result.get()), held.y, row + output)
