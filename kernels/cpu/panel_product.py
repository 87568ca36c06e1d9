"""The product of `product.py` in float32, for many tokens: where bytes have no instruction of their own, or x has three
digits, floats take less.

128 inputs of one or two tiles become floats once, times their scales, and stay in the nearest cache while all tokens
are multiplied with them (`panels.py`). Sums lie in memory between panels.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch

from quantkit.kernels.cpu import product
from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.float8 import QUADS
from quantkit.kernels.cpu.float_product import places
from quantkit.kernels.cpu.language import F32, I64, Code, Value
from quantkit.kernels.cpu.panels import decode_block, decode_float8
from quantkit.kernels.cpu.processor import Processor
from quantkit.kernels.cpu.product_kind import Arguments, Kind
from quantkit.kernels.cpu.tiles import ROWS

DEPTH = 128  # inputs of a panel
_SHAPES: dict[str | int, tuple[int, tuple[int, ...]]] = {
    "arm": (1, (2, 4, 6)),
    16: (1, (2,)),
    32: (1, (2, 4, 6)),
    64: (2, (2, 4, 8)),
}  # by the bytes of a vector: tiles at a time, and counts of tokens
_CHUNK = 16  # times the tokens at a time share a panel


class PanelKind(NamedTuple):
    """What kernels are compiled for."""

    codes: Kind | None  # None: rows of float8
    dtype: torch.dtype  # of y and bias
    tiles: int  # at a time
    tokens: int  # at a time

    @property
    def step(self) -> int:
        """Inputs that are decoded together."""
        return QUADS if self.codes is None else self.codes.block

    @property
    def depth(self) -> int:
        """Inputs of a panel."""
        return max(1, DEPTH // self.step) * self.step

    @property
    def width(self) -> int:
        """Outputs of a panel."""
        return self.tiles * ROWS


def shape_for(processor: Processor, tokens: int) -> tuple[int, int]:
    """Tiles and tokens at a time: what registers hold sums for, beside a vector of each."""
    tiles, counts = _SHAPES["arm" if processor.is_arm else processor.vector]
    return tiles, min(reversed(counts), key=lambda count: -(-tokens // count) * (count + 2))


@cache
def kernel(kind: PanelKind) -> int:
    return compiled("panel_product", 3, partial(multiply, kind=kind))


def multiply(code: Code, arguments: Value, first: Value, last: Value, *, kind: PanelKind) -> None:
    held = Arguments(*(code.load(I64, arguments, place) for place in range(len(Arguments._fields))))
    panel = code.room(F32.x(ROWS), kind.depth * kind.tiles)
    sums = code.room(F32.x(ROWS), _CHUNK * kind.tokens * kind.tiles)
    count, end = (held.outputs + (ROWS - 1)) // ROWS, last * held.tiles
    with (
        code.loop(first * held.tiles, code.smaller(end, count), kind.tiles) as tile,
        code.loop(0, held.tokens, _CHUNK * kind.tokens) as token,
    ):
        stop = code.smaller(token + _CHUNK * kind.tokens, held.tokens)
        with code.loop(0, (stop - token + (kind.tokens - 1)) * kind.tiles) as number:
            code.store(code.constant(F32.x(ROWS), 0.0), sums, number * ROWS)
        with code.loop(0, held.inputs, kind.depth) as start:
            depth = code.smaller(code.constant(I64, kind.depth), held.inputs - start)
            _decode(code, held, kind, (tile, count), (start, depth), panel)
            with code.loop(token, stop, kind.tokens) as some:
                x = [held.x + (row * held.inputs + start) * 4 for row in places(code, some, kind.tokens, held.tokens)]
                _add(code, kind, x, panel, sums + (some - token) * (4 * kind.width), depth)
        _store(code, held, kind, (tile, count), (token, stop), sums)


def _decode(
    code: Code, held: Arguments, kind: PanelKind, tiles: tuple[Value, Value], inputs: tuple[Value, Value], panel: Value
) -> None:
    """So many inputs from the first of them on; behind the last tile stands the last one again."""
    (tile, count), (start, depth) = tiles, inputs
    for number in range(kind.tiles):
        own, to = code.smaller(tile + number, count - 1), panel + 4 * ROWS * number
        if kind.codes is None:
            decode_float8(code, held, own, start, depth, to, kind.width)
        else:
            with code.loop(0, depth, kind.step) as place:
                block = (start + place) // kind.step
                decode_block(code, held, kind.codes, own, block, to + place * (4 * kind.width), kind.width)


def _add(code: Code, kind: PanelKind, x: list[Value], panel: Value, sums: Value, depth: Value) -> None:
    """Some inputs of some tokens, of which `x` has the addresses, times a panel."""
    totals = [code.variable(code.constant(F32.x(ROWS), 0.0)) for _ in range(kind.tokens * kind.tiles)]
    with code.loop(0, depth) as at:
        weights = [code.load(F32.x(ROWS), panel, (at * kind.tiles + number) * ROWS) for number in range(kind.tiles)]
        for token, inputs in enumerate(x):
            same = code.load(F32, inputs, at).splat(ROWS)
            for number, weight in enumerate(weights):
                total = totals[token * kind.tiles + number]
                total.set(code.fma(weight, same, total.get()))
    for place, total in enumerate(totals):
        code.store(code.load(total.type, sums, place * ROWS) + total.get(), sums, place * ROWS)


def _store(
    code: Code, held: Arguments, kind: PanelKind, tiles: tuple[Value, Value], tokens: tuple[Value, Value], sums: Value
) -> None:
    (tile, count), (first, stop) = tiles, tokens
    with code.loop(first, stop) as token:
        for number in range(kind.tiles):
            with code.when(tile + number < count):
                total = code.load(F32.x(ROWS), sums, ((token - first) * kind.tiles + number) * ROWS)
                product.store(code, held, kind.dtype, (tile + number) * ROWS, token, total)
