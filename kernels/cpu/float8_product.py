"""y = x @ weight.T + bias for weight and x both in float8, multiplied in float16: twice as many at once as in float32.

A product of two float8 has 8 bits, of which float16 keeps 11: it is exact. Sums are not, so a lane adds up only `CHAIN`
products in float16. Then lanes are added in pairs until one vector holds the sums of all tokens side by side, which is
widened, scaled and added in float32. What that costs is less than to round y to bfloat16. The bits of a float8, put
where a float16 has its sign, the end of its exponent and the beginning of its mantissa, mean 2^-8 times the same
number, also where it has no leading one; x is held lowered, so that the largest sums end far below 65504.

To put the bits there takes as long as to multiply them with a few tokens. Of many tokens all read what was put there
once, in memory that a piece of work has for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch

from quantkit.kernels.cpu.compiling import compiled
from quantkit.kernels.cpu.float8 import LOWERED
from quantkit.kernels.cpu.float_product import Arguments, Turn, places, store
from quantkit.kernels.cpu.language import F16, F32, I8, I16, I64, Code, Type, Value
from quantkit.kernels.cpu.processor import this_processor
from quantkit.kernels.cpu.rows import along, total

CHAIN = 32
FEW = 8  # tokens, up to which each turn reads float8
_UNIT = 2.0**8 / LOWERED

Weights = Callable[[Value, int], list[Value]]  # of all rows of a turn, float16, from a place on


class Kind(NamedTuple):
    """What kernels are compiled for: y and bias, and what a turn has."""

    dtype: torch.dtype
    tokens: int
    rows: int
    vectors: int  # of a row at a time: enough sums that none waits for the last one
    shared: bool = False  # rows are put into memory for all tokens first


def kind_for(dtype: torch.dtype, tokens: int) -> Kind:
    if tokens > FEW:
        return Kind(dtype, 4, 4, 1, shared=True)
    together = max(count for count in (1, 2, 4, FEW) if count <= tokens)
    return Kind(dtype, together, rows=2 if together == FEW else 1, vectors={1: 4, 2: 2, 4: 2, FEW: 1}[together])


def fits(dtype: torch.dtype) -> bool:
    """Whether y of this dtype has no more bits than the sums, and this processor multiplies float16."""
    return dtype == torch.bfloat16 and this_processor().multiplies_halves


@cache
def kernel(kind: Kind) -> int:
    return compiled("float8_product", 3, partial(multiply, kind=kind))


def multiply(code: Code, arguments: Value, first: Value, last: Value, *, kind: Kind) -> None:
    """Arguments are those of `float_product.py` with x in float16, and behind them memory for `shared` rows: float16
    [pieces, rows, inputs]."""
    held = Arguments(*(code.load(I64, arguments, place) for place in range(len(Arguments._fields))))
    memory = code.load(I64, arguments, len(Arguments._fields)) if kind.shared else None
    end = last * held.each
    with code.loop(first * held.each, code.smaller(end, held.outputs), kind.rows) as row:
        rows = places(code, row, kind.rows, held.outputs)
        if memory is None:
            weights = partial(_float8, code, held, rows)
        else:
            own = memory + first * held.inputs * (2 * kind.rows)
            _put(code, held, rows, own)
            weights = partial(_halves, code, held, kind.rows, own)
        with code.loop(0, held.tokens, kind.tokens) as token:
            turn = Turn(rows, places(code, token, kind.tokens, held.tokens))
            for (output, place), value in zip(product(*turn), _sums(code, held, kind, turn, weights), strict=True):
                store(code, held, kind.dtype, place, output, value)


def _float8(code: Code, held: Arguments, rows: list[Value], place: Value, lanes: int) -> list[Value]:
    """Times 2^-8."""
    bits = [code.load(I8.x(lanes), held.weight, row * held.inputs + place).to(I16) for row in rows]
    return [((each << 7) & 0xBFFF).view(F16.x(lanes)) for each in bits]  # the sign without its copy


def _halves(code: Code, held: Arguments, rows: int, memory: Value, place: Value, lanes: int) -> list[Value]:
    """The same from memory."""
    return [code.load(F16.x(lanes), memory, held.inputs * row + place) for row in range(rows)]


def _put(code: Code, held: Arguments, rows: list[Value], memory: Value) -> None:
    """Rows as float16 into memory."""

    def write(place: Value, lanes: int) -> None:
        for number, weight in enumerate(_float8(code, held, rows, place, lanes)):
            code.store(weight, memory, held.inputs * number + place)

    along(code, held.inputs, write)


def _sums(code: Code, held: Arguments, kind: Kind, turn: Turn, weights: Weights) -> list[Value]:
    """One number for each row and token: many lanes at a time, then one by one."""
    vector = code.processor.vector // 2
    lanes, each = kind.vectors * vector, vector // kind.tokens
    sums = [code.variable(code.constant(F32.x(vector), 0.0)) for _ in turn.rows]
    rest = [code.variable(code.constant(F32, 0.0)) for _ in product(*turn)]
    group = held.inputs // held.groups
    with code.loop(0, held.groups) as number:
        start, stop = number * group, (number + 1) * group
        whole = start + group // lanes * lanes
        rows = [code.load(F32, held.scales, row * held.groups + number) * _UNIT for row in turn.rows]
        tokens = [code.load(F32, held.x_scales, token * held.groups + number) for token in turn.tokens]
        beside = code.join([token.splat(each) for token in tokens])
        with code.loop(start, whole, CHAIN * lanes) as first:
            end = first + CHAIN * lanes
            span = first, code.select(end < whole, end, whole)
            for value, row, chains in zip(sums, rows, _chains(code, held, turn, weights, lanes, span), strict=True):
                value.set(code.fma(_side_by_side(code, chains, vector), beside * row.splat(vector), value.get()))
        ends = _chains(code, held, turn, weights, 1, (whole, stop), F32)
        for value, (row, token), one in zip(
            rest, product(rows, tokens), (one for own in ends for one in own), strict=True
        ):
            value.set(code.fma(one.at(0), row * token, value.get()))
    parts = [total(many.get().cut(place * each, each)) for many in sums for place in range(kind.tokens)]
    return [part + one.get() for part, one in zip(parts, rest, strict=True)]


def _chains(
    code: Code, held: Arguments, turn: Turn, weights: Weights, lanes: int, span: tuple[Value, Value], added: Type = F16
) -> list[list[Value]]:
    """For each row and token the products over some of the inputs, added up lane by lane."""
    sums = [[code.variable(code.constant(added.x(lanes), 0.0)) for _ in turn.tokens] for _ in turn.rows]
    with code.loop(*span, lanes) as place:
        x = [code.load(F16.x(lanes), held.x, token * held.inputs + place).to(added) for token in turn.tokens]
        for weight, own in zip(weights(place, lanes), sums, strict=True):
            for values, value in zip(x, own, strict=True):
                value.set(code.fma(weight.to(added), values, value.get()))
    return [[value.get() for value in own] for own in sums]


def _side_by_side(code: Code, sums: list[Value], lanes: int) -> Value:
    """One vector with the sums of all tokens, each in as many lanes; float32."""
    while sums[0].type.lanes > lanes:
        half = sums[0].type.lanes // 2
        sums = [one.cut(0, half) + one.cut(half, half) for one in sums]
    while len(sums) > 1:
        sums = [_pairs(code, left, right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0].to(F32)


def _pairs(code: Code, left: Value, right: Value) -> Value:
    """Sums of neighbours, of two vectors."""
    if code.processor.is_arm:
        return code.call(f"llvm.aarch64.neon.faddp.v{left.type.lanes}f16", left.type, left, right)
    both = code.join([left, right])
    return both.pick(range(0, both.type.lanes, 2)) + both.pick(range(1, both.type.lanes, 2))
