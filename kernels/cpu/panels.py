"""Weights in float32 as a product of many tokens reads them (`panel_product.py`): of one input after the other a vector
of 16 outputs.
"""

from __future__ import annotations

from quantkit.kernels.cpu import product
from quantkit.kernels.cpu.bytes import look_up_float, looks_up_floats
from quantkit.kernels.cpu.float8 import QUADS, quads_of
from quantkit.kernels.cpu.language import F32, I32, I64, Code, Value
from quantkit.kernels.cpu.product_kind import Arguments, Kind
from quantkit.kernels.cpu.small_scales import outer_of
from quantkit.kernels.cpu.tiles import ROWS


def decode_block(code: Code, held: Arguments, kind: Kind, tile: Value, block: Value, panel: Value, width: int) -> None:
    """A block of a tile of packed codes; a vector in the panel every `width` numbers."""
    group = block // held.blocks
    outer = outer_of(code, held, kind, (tile * held.groups + group) // kind.every * ROWS)
    grid = product.grid_of(code, held, kind, (tile * held.groups + group) * ROWS, outer)
    scales = grid.scales * kind.codes.unit(kind.codes.used(kind.digits))
    bytes_each = kind.codes.bits * ROWS // 8  # of an input
    codes = code.variable(held.codes + (tile * held.inputs + block * kind.block) * bytes_each)
    with code.loop(0, kind.block, kind.codes.step) as start:
        for quad in range(kind.codes.step // 4):
            for place, number in enumerate(numbers_of(code, kind, codes.get(), quad, grid.zeros)):
                value = number * scales if grid.lows is None else code.fma(number, scales, grid.lows)
                code.store(value, panel, (start + (4 * quad + place)) * width)
        codes.set(codes.get() + kind.codes.step * bytes_each)


def numbers_of(code: Code, kind: Kind, address: Value, quad: int, zeros: Value | None) -> list[Value]:
    """What codes stand for, less their zero points and before any scale: of 16 outputs, for each input of a quad."""
    if kind.codes.float8:
        return quads_of(code.load(I32.x(ROWS), address, quad * ROWS))
    if kind.codes.digits and looks_up_floats(code.processor):
        held = code.load(I32.x(ROWS), address, quad // 2 * ROWS)
        table = kind.codes.numbers
        return [look_up_float(code, table, held >> (8 * place + quad % 2 * 4)) for place in range(4)]
    zero = zeros if zeros is not None else kind.codes.zero or 0
    digits = [value.view(I32.x(ROWS)) for value in product.quad_of(code, kind, address, quad)]
    return [(_whole_number(code, kind, digits, place) - zero).to(F32) for place in range(4)]


def _whole_number(code: Code, kind: Kind, digits: list[Value], place: int) -> Value:
    """Of one of four bytes, in all lanes; of several digits each counts 256 times the next."""
    signed = code.processor.multiplies_signed and kind.codes.dot_bits == 8
    total = None
    for digit in digits:
        if signed:
            byte = (digit << (24 - 8 * place)).signed_shift(24)
        else:
            byte = (digit >> (8 * place)) & 255
            byte = byte - 128 if kind.codes.digits else byte
        total = byte if total is None else (total << 8) + byte
    assert total is not None
    return total


def decode_float8(
    code: Code, held: Arguments, tile: Value, start: Value, depth: Value, panel: Value, width: int
) -> None:
    """Some inputs of a tile, 64 at a time, from rows of float8; the last row stands for those behind it. They
    share a scale."""
    group = start // (held.inputs // held.groups)
    rows, scales = [], code.variable(code.constant(F32.x(ROWS), 0.0))
    for number in range(ROWS):
        row = tile * ROWS + number
        row = code.select(row < held.outputs, row, held.outputs - 1)
        rows.append(held.codes + (row * held.inputs + start))
        scale = code.load(F32, held.scales, row * held.groups + group) * 2.0**120
        scales.set(scales.get().put(scale, code.constant(I64, number)))
    with code.loop(0, depth, QUADS) as place:
        for quad, words in enumerate(transposed(code, [code.load(I32.x(ROWS), row + place) for row in rows])):
            for byte, values in enumerate(quads_of(words)):
                code.store(values * scales.get(), panel, (place + (4 * quad + byte)) * width)


def transposed(code: Code, rows: list[Value]) -> list[Value]:
    """As many vectors as lanes, the other way round."""
    count, distance = len(rows), 1
    while distance < count:
        swapped = list(rows)
        for number in (number for number in range(count) if not number & distance):
            both = code.join([rows[number], rows[number + distance]])
            for place, base in ((number, 0), (number + distance, distance)):
                lanes = [lane - (lane & distance) + base + (count if lane & distance else 0) for lane in range(count)]
                swapped[place] = both.pick(lanes)
        rows, distance = swapped, 2 * distance
    return rows
