"""The product of `product.py` for many tokens: a block's codes become bytes once, and stay in the nearest cache while
all tokens are multiplied with them. Sums of the tokens lie in memory between blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from quantkit.kernels.cpu import product
from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.language import F32, I8, I32, I64, Code, Value, Variable
from quantkit.kernels.cpu.product import INPUTS, Grid
from quantkit.kernels.cpu.product_kind import Arguments, Kind
from quantkit.kernels.cpu.small_scales import Outer, WholeSums, outer_of, small_of
from quantkit.kernels.cpu.tiles import ROWS

_TOKENS = 128  # that share a decoded block: their sums take 8 KB


@cache
def kernel(kind: Kind) -> int:
    """Of either product."""
    return compiled("product", 3, partial(multiply if kind.wide else product.multiply, kind=kind))


def multiply(code: Code, arguments: Value, first: Value, last: Value, *, kind: Kind) -> None:
    held = Arguments(*(code.load(I64, arguments, place) for place in range(len(Arguments._fields))))
    sums = code.room(F32.x(ROWS), _TOKENS + kind.tokens)
    used = kind.codes.used(kind.digits)
    groups = kind.every if kind.whole_scales else 1  # decoded at once
    decoded = code.room(I8.x(4 * ROWS), used * groups * kind.block // 4)
    small = code.room(I32.x(ROWS), 2 * groups)
    count, end = (held.outputs + (ROWS - 1)) // ROWS, last * held.tiles
    with (
        code.loop(first * held.tiles, code.smaller(end, count)) as tile,
        code.loop(0, held.tokens, _TOKENS) as token,
    ):
        stop = code.smaller(token + _TOKENS, held.tokens)
        with code.loop(0, stop - token + (kind.tokens - 1)) as number:
            code.store(code.constant(F32.x(ROWS), 0.0), sums, number * ROWS)
        _add_tile(code, held, kind, tile, (token, stop), sums, (decoded, small))
        with code.loop(token, stop, kind.tokens) as some:
            totals = [code.variable(total) for total in _loaded(code, kind, sums, some - token)]
            if kind.outliers:
                product.add_outliers(code, held, kind, tile, code.constant(I64, 0), some, totals)
            for place, total in enumerate(totals):
                with code.when(some + place < stop):
                    product.store(code, held, kind.dtype, tile * ROWS, some + place, total.get())


def _loaded(code: Code, kind: Kind, sums: Value, first: Value) -> list[Value]:
    return [code.load(F32.x(ROWS), sums, (first + place) * ROWS) for place in range(kind.tokens)]


def _add_tile(
    code: Code,
    held: Arguments,
    kind: Kind,
    tile: Value,
    tokens: tuple[Value, Value],
    sums: Value,
    room: tuple[Value, Value],
) -> None:
    codes, decoded = code.variable(held.codes + tile * held.inputs * (ROWS * kind.codes.bits // 8)), room[0]
    with code.loop(0, held.groups, kind.every) as first:
        outer = outer_of(code, held, kind, (tile * held.groups + first) // kind.every * ROWS)
        if kind.whole_scales:
            _decode_groups(code, held, kind, codes, (tile * held.groups + first) * ROWS, room)
            with code.loop(*tokens, kind.tokens) as token:
                _add_groups(code, held, kind, outer, (token, first), sums + (token - tokens[0]) * (4 * ROWS), room)
        else:
            with code.loop(first, first + kind.every) as group:
                grid = product.grid_of(code, held, kind, (tile * held.groups + group) * ROWS, outer)
                with code.loop(0, held.blocks) as part:
                    _decode(code, kind, codes, decoded)
                    with code.loop(*tokens, kind.tokens) as token:
                        block, at = group * held.blocks + part, sums + (token - tokens[0]) * (4 * ROWS)
                        _add_block(code, held, kind, grid, (token, block), at, decoded)


def _decode_groups(
    code: Code, held: Arguments, kind: Kind, codes: Variable, place: Value, room: tuple[Value, Value]
) -> None:
    """The bytes of groups that share an outer scale, and their small scales and lows in 32 bits."""
    decoded, small = room
    with code.loop(0, kind.every) as group:
        _decode(code, kind, codes, decoded + group * (kind.block * ROWS))
        for number, values in enumerate(small_of(code, held, kind, place + group * ROWS)):
            if values is not None:
                code.store(values, small, (group * 2 + number) * ROWS)


def _add_groups(
    code: Code,
    held: Arguments,
    kind: Kind,
    outer: Outer,
    where: tuple[Value, Value],
    sums: Value,
    room: tuple[Value, Value],
) -> None:
    """Groups of some tokens, which `where` names first."""
    (token, first), (decoded, small) = where, room
    counted = [WholeSums.begun(code, kind) for _ in range(kind.tokens)]
    with code.loop(0, kind.every) as number:
        group = first + number
        sums_of_x = product.digit_sums(code, held, kind, token, group)
        offsets, bytes_ = kind.codes.offsets(code.processor, 1), decoded + number * (kind.block * ROWS)
        whole = _block_sums(code, held, kind, (token, group), offsets, sums_of_x, bytes_)
        scales, lows = (code.load(I32.x(ROWS), small, (number * 2 + place) * ROWS) for place in range(2))
        for own, (part,), (of_x,) in zip(counted, whole, sums_of_x, strict=True):
            own.add(part, of_x, (scales, lows if kind.lows else None))
    for place, (total, own) in enumerate(zip(_loaded(code, kind, sums, code.constant(I64, 0)), counted, strict=True)):
        scale = code.load(F32, held.x_scales, (token + place) * held.groups + first)
        code.store(own.scaled(code, kind, total, outer, scale), sums, place * ROWS)


def _decode(code: Code, kind: Kind, codes: Variable, decoded: Value) -> None:
    """The bytes of a block; those of a second digit behind all of the first."""
    with code.loop(0, kind.block, kind.codes.step) as start:
        for quad in range(kind.codes.step // 4):
            for digit, value in enumerate(product.quad_of(code, kind, codes.get(), quad)):
                place = (start // 4 + (digit * kind.block // 4 + quad)) * (4 * ROWS)
                code.store(value, decoded, place)
        codes.set(codes.get() + kind.codes.step * ROWS * kind.codes.bits // 8)


def _add_block(
    code: Code, held: Arguments, kind: Kind, grid: Grid, where: tuple[Value, Value], sums: Value, decoded: Value
) -> None:
    """A block of some tokens, which `where` names first."""
    (token, block), zeros = where, grid.zeros
    offsets = [zeros if zeros is not None else one for one in kind.codes.offsets(code.processor, kind.digits)]
    sums_of_x = product.digit_sums(code, held, kind, token, block)
    whole = _block_sums(code, held, kind, where, offsets, sums_of_x, decoded)
    for number, total in enumerate(_loaded(code, kind, sums, code.constant(I64, 0))):
        scale = code.load(F32, held.x_scales, (token + number) * held.groups * held.blocks + block)
        added = product.add_scaled(code, kind, grid, total, whole[number], sums_of_x[number], scale)
        code.store(added, sums, number * ROWS)


def _block_sums(
    code: Code,
    held: Arguments,
    kind: Kind,
    where: tuple[Value, Value],
    offsets: Sequence[Value | int],
    sums_of_x: list[list[Value]],
    decoded: Value,
) -> list[list[Value]]:
    """Whole numbers of a block, of each token as many as there are sums."""
    token, block = where
    whole = [[code.variable(start) for start in product.starts(code, kind, offsets, own)] for own in sums_of_x]
    with code.loop(0, kind.block, INPUTS) as start:
        x = product.load_x(code, held, kind, token, block, start)
        for quad in range(INPUTS // 4):
            places = [(start // 4 + (digit * kind.block // 4 + quad)) * (4 * ROWS)
                      for digit in range(kind.codes.used(kind.digits))]  # fmt: skip
            values = [code.load(I8.x(4 * ROWS), decoded, place) for place in places]
            product.multiply_quad(code, kind, values, quad, x, whole)
    return [[part.get() for part in own] for own in whole]
