"""The product of `product.py` for many tokens: a block's codes become bytes once, and stay in the nearest cache while
all tokens are multiplied with them. Sums of the tokens lie in memory between blocks.
"""

from __future__ import annotations

from functools import cache, partial

from quantkit.kernels.cpu import product
from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.language import F32, I8, I64, Code, Value, Variable
from quantkit.kernels.cpu.product import INPUTS, Arguments, Grid, Kind
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
    decoded = code.room(I8.x(4 * ROWS), used * kind.block // 4)
    count, end = (held.outputs + (ROWS - 1)) // ROWS, last * held.tiles
    with (
        code.loop(first * held.tiles, code.select(end < count, end, count)) as tile,
        code.loop(0, held.tokens, _TOKENS) as token,
    ):
        stop = code.select(token + _TOKENS < held.tokens, token + _TOKENS, held.tokens)
        with code.loop(0, stop - token + (kind.tokens - 1)) as number:
            code.store(code.constant(F32.x(ROWS), 0.0), sums, number * ROWS)
        _add_tile(code, held, kind, tile, (token, stop), sums, decoded)
        with code.loop(token, stop, kind.tokens) as some:
            totals = [code.variable(total) for total in _loaded(code, kind, sums, some - token)]
            if kind.outliers:
                product.add_outliers(code, held, kind, tile, code.constant(I64, 0), some, totals)
            for place, total in enumerate(totals):
                with code.when(some + place < stop):
                    product.store(code, held, kind, tile * ROWS, some + place, total.get())


def _loaded(code: Code, kind: Kind, sums: Value, first: Value) -> list[Value]:
    return [code.load(F32.x(ROWS), sums, (first + place) * ROWS) for place in range(kind.tokens)]


def _add_tile(
    code: Code, held: Arguments, kind: Kind, tile: Value, tokens: tuple[Value, Value], sums: Value, decoded: Value
) -> None:
    codes = code.variable(held.codes + tile * held.inputs * (ROWS * kind.codes.bits // 8))
    with code.loop(0, held.groups, kind.every) as first:
        outer = product.outer_of(code, held, kind, (tile * held.groups + first) // kind.every * ROWS)
        with code.loop(first, first + kind.every) as group:
            grid = product.grid_of(code, held, kind, (tile * held.groups + group) * ROWS, outer)
            with code.loop(0, held.blocks) as part:
                _decode(code, kind, codes, decoded)
                with code.loop(*tokens, kind.tokens) as token:
                    block, at = group * held.blocks + part, sums + (token - tokens[0]) * (4 * ROWS)
                    _add_block(code, held, kind, grid, (token, block), at, decoded)


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
    whole = [[code.variable(start) for start in product.starts(code, kind, offsets, own)] for own in sums_of_x]
    with code.loop(0, kind.block, INPUTS) as start:
        x = product.load_x(code, held, kind, token, block, start)
        for quad in range(INPUTS // 4):
            places = [(start // 4 + (digit * kind.block // 4 + quad)) * (4 * ROWS)
                      for digit in range(kind.codes.used(kind.digits))]  # fmt: skip
            values = [code.load(I8.x(4 * ROWS), decoded, place) for place in places]
            product.multiply_quad(code, kind, values, quad, x, whole)
    for number, total in enumerate(_loaded(code, kind, sums, code.constant(I64, 0))):
        scale = code.load(F32, held.x_scales, (token + number) * held.groups * held.blocks + block)
        parts = [part.get() for part in whole[number]]
        added = product.add_scaled(code, kind, grid, total, parts, sums_of_x[number], scale)
        code.store(added, sums, number * ROWS)
