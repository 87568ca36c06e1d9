"""The product of `product.py` in float32, for a few tokens: codes become floats in registers, and nothing is kept.

One instruction of AVX-512 finds 16 values of a table, where whole numbers take one for each digit of x and of the
table. For more tokens there are panels (`panel_product.py`), which do not decode a weight twice.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch

from quantkit.kernels.cpu import product
from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.float_product import places
from quantkit.kernels.cpu.language import F32, I64, Code, Value, Variable
from quantkit.kernels.cpu.panels import numbers_of
from quantkit.kernels.cpu.processor import Processor
from quantkit.kernels.cpu.product_kind import Arguments, Kind
from quantkit.kernels.cpu.small_scales import outer_of
from quantkit.kernels.cpu.tiles import ROWS

_AT_ONCE = (1, 2, 4, 8)  # tokens; with more, decoding a tile again costs more than a panel
_CHAINS = 4  # sums that do not wait for each other


class TileKind(NamedTuple):
    """What kernels are compiled for."""

    codes: Kind
    dtype: torch.dtype  # of y and bias
    tokens: int  # at a time


def takes(processor: Processor, tokens: int) -> bool:
    """Registers of 64 bytes hold sums of eight tokens beside what is decoded."""
    return processor.vector == 64 and tokens <= _AT_ONCE[-1]


def kind_for(codes: Kind, dtype: torch.dtype, tokens: int) -> TileKind:
    return TileKind(codes, dtype, next(count for count in _AT_ONCE if tokens <= count))


@cache
def kernel(kind: TileKind) -> int:
    return compiled("tile_product", 3, partial(multiply, kind=kind))


def multiply(code: Code, arguments: Value, first: Value, last: Value, *, kind: TileKind) -> None:
    held = Arguments(*(code.load(I64, arguments, place) for place in range(len(Arguments._fields))))
    count, end = (held.outputs + (ROWS - 1)) // ROWS, last * held.tiles
    with (
        code.loop(first * held.tiles, code.smaller(end, count)) as tile,
        code.loop(0, held.tokens, kind.tokens) as token,
    ):
        some = places(code, token, kind.tokens, held.tokens)
        totals = [code.variable(code.constant(F32.x(ROWS), 0.0)) for _ in some]
        with code.loop(0, held.groups * held.blocks) as block:
            x = [held.x + (row * held.inputs + block * kind.codes.block) * 4 for row in some]
            _add_block(code, held, kind, (tile, block), x, totals)
        for row, total in zip(some, totals, strict=True):
            product.store(code, held, kind.dtype, tile * ROWS, row, total.get())


def _add_block(
    code: Code, held: Arguments, kind: TileKind, at: tuple[Value, Value], x: list[Value], totals: list[Variable]
) -> None:
    """A block of a tile, times the same inputs of some tokens, of which `x` has the addresses."""
    (tile, block), codes = at, kind.codes
    group = block // held.blocks
    outer = outer_of(code, held, codes, (tile * held.groups + group) // codes.every * ROWS)
    grid = product.grid_of(code, held, codes, (tile * held.groups + group) * ROWS, outer)
    chains = max(1, _CHAINS // kind.tokens)
    none = code.constant(F32.x(ROWS), 0.0)
    sums = [[code.variable(none) for _ in range(chains)] for _ in x]
    bytes_each = codes.codes.bits * ROWS // 8  # of an input
    start = held.codes + (tile * held.inputs + block * codes.block) * bytes_each
    scales = grid.scales * codes.codes.unit(codes.codes.used(codes.digits))
    with code.loop(0, codes.block, codes.codes.step) as step:
        for quad in range(codes.codes.step // 4):
            for place, numbers in enumerate(numbers_of(code, codes, start + step * bytes_each, quad, grid.zeros)):
                weights = numbers if grid.lows is None else code.fma(numbers, scales, grid.lows)
                for own, inputs in zip(sums, x, strict=True):
                    same = code.load(F32, inputs, step + (4 * quad + place)).splat(ROWS)
                    total = own[place % chains]
                    total.set(code.fma(weights, same, total.get()))
    for own, total in zip(sums, totals, strict=True):
        whole = own[0].get()
        for chain in own[1:]:
            whole = whole + chain.get()
        total.set(code.fma(whole, scales, total.get()) if grid.lows is None else total.get() + whole)
