"""Linear layers on a CPU from packed codes, by kernels that are compiled for it (`kernels/cpu/product.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.formats import AbsmaxInt8Weight, CodebookWeight, GgufWeight, IntegerWeight, QuantizedWeight
from quantkit.formats.base import InputRounding
from quantkit.formats.codebook import table_of
from quantkit.formats.integer import middle_code
from quantkit.kernels.cpu import installed
from quantkit.kernels.linear.weight import padded

if TYPE_CHECKING:
    from quantkit.kernels.cpu.tiles import Codes
    from quantkit.kernels.linear.cpu.panels import PanelPlan

TILE_ROWS = 16  # outputs, as `kernels/cpu/tiles.py` has it
_LARGEST_BLOCK = 128  # inputs of x that share a scale: sums of products fit 32 bits
_SHORT = 1024  # inputs of a row with one scale, up to which it is padded to whole steps and not to whole blocks
_PIECES = 8  # of a product with one token for each thread: who is free takes the next. More tokens have as many more: a
# thread that waits for the last piece of another must not fall asleep
_WIDER = {3: 4, 5: 6}  # bits that codes get whose own make planes of one bit
_THREE_DIGITS = 127 * 256 * 256  # the largest value of a table


class Registers(NamedTuple):
    """What a processor's vectors have room for: tokens that share what was decoded.

    precise    x of several digits
    wide_from  tokens from which on codes are decoded for all of them, and those of 8 bits, which need no decoding
    wide       tokens at a time from there on
    halved     so many at a time leave room for half the outputs of a tile
    """

    at_once: tuple[int, ...]
    precise: tuple[int, ...]
    wide: int
    wide_from: tuple[int, int] = (8, 32)
    halved: int | None = None


# By the bytes of a vector.
_REGISTERS = {
    16: Registers((1, 2, 4, 8), (1, 2), 4, (32, 32), halved=8),
    32: Registers((1, 2, 4), (1, 2), 4),
    64: Registers((1, 4, 8), (1,), 8),
}


class Plan(NamedTuple):
    """What a product with some number of tokens always has: arguments of its kernel (`product.py`), and sizes."""

    kernel: int
    weight: tuple[int, ...]  # its first arguments
    sizes: tuple[int, ...]  # its last but two
    room: int  # tokens that x has room for
    inputs: int
    pieces: int


@dataclass(frozen=True, eq=False)
class Tiles:
    """A weight as `kernels/cpu/tiles.py` lays it out.

    codes   uint8 [tiles, bytes]
    scales  float [tiles, groups, 16]
    zeros   uint8 [tiles, groups, 16] | None
    block   inputs of x that share a scale; a group has one block or several
    lows    [tiles, groups, 16] | None: what is added to every weight of a group; in the dtype of `scales`
    outer   float16 [tiles, groups / every, 16] | None: scales and lows are int8 then, times these
    """

    meaning: Codes
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    block: int
    lows: Tensor | None = None
    outer_scales: Tensor | None = None
    outer_lows: Tensor | None = None
    panel_plans: dict[tuple[object, ...], PanelPlan] = field(default_factory=dict, init=False, repr=False)
    _plans: dict[tuple[object, ...], Plan] = field(default_factory=dict, init=False, repr=False)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + sum(part.nbytes for part in self.numbers.values() if part is not None)

    @property
    def numbers(self) -> dict[str, Tensor | None]:
        """All but the codes."""
        names = ("scales", "zeros", "lows", "outer_scales", "outer_lows")
        return {name: getattr(self, name) for name in names}

    @property
    def every(self) -> int:
        """Groups that share an outer scale."""
        return 1 if self.outer_scales is None else self.scales.shape[1] // self.outer_scales.shape[1]

    def plan(
        self, digits: int, tokens: int, outputs: int, dtype: torch.dtype, threads: int, outliers: bool = False
    ) -> Plan:
        """How this weight is multiplied with so many tokens."""
        asked = (digits, tokens, outputs, dtype, threads, outliers)
        if asked not in self._plans:
            self._plans[asked] = self._new_plan(*asked)
        return self._plans[asked]

    def _new_plan(
        self, digits: int, tokens: int, outputs: int, dtype: torch.dtype, threads: int, outliers: bool
    ) -> Plan:
        from quantkit.kernels.cpu.processor import this_processor
        from quantkit.kernels.cpu.product import Kind
        from quantkit.kernels.cpu.wide_product import kernel

        registers = _REGISTERS[this_processor().vector]
        wide = digits == 1 and tokens >= registers.wide_from[self.meaning.bits == 8]
        counts = (registers.wide,) if wide else registers.at_once if digits == 1 else registers.precise
        together = _together(tokens, counts)
        count, groups = len(self.codes), self.scales.shape[1]
        each = max(1, count // (_PIECES * threads * tokens))
        inputs = groups * self.group
        lows = None if self.lows is None else self.lows.dtype
        kind = Kind(
            *(self.meaning, self.block, digits, together, dtype, self.scales.dtype, self.every, lows, outliers),
            wide=wide,
            rows=TILE_ROWS // 2 if together == registers.halved and not wide else TILE_ROWS,
        )
        scales, zeros, *others = (0 if part is None else part.data_ptr() for part in self.numbers.values())
        return Plan(
            kernel=kernel(kind),
            weight=(self.codes.data_ptr(), scales, zeros),
            sizes=(outputs, inputs, groups, self.group // self.block, each, *others),
            room=padded(tokens, together),
            inputs=inputs,
            pieces=-(-count // each),
        )

    @property
    def has_rows(self) -> bool:
        """Whether single rows can be decoded: codes of 8 bits have a byte of their own."""
        return self.meaning.bits == 8 and self.meaning.zero is not None and self.lows is self.outer_scales is None

    def rows(self, outputs: Tensor) -> Tensor:
        """Float32 [some, padded inputs]."""
        from quantkit.kernels.cpu.processor import this_processor

        tile, row = outputs // TILE_ROWS, outputs % TILE_ROWS
        codes = self.codes.view(len(self.codes), -1, TILE_ROWS, 4)[tile, :, row].flatten(1)  # quads of inputs
        signed = codes.view(torch.int8) if this_processor().multiplies_signed else codes
        scales = self.scales[tile, :, row].float().repeat_interleave(self.group, 1)
        return (signed.float() - (self.meaning.zero or 0)) * scales

    @property
    def kind(self) -> tuple[object, ...]:
        """What those have in common that can be joined."""
        return self.meaning, self.group, self.block, self.scales.shape[1:], self.scales.dtype, self.every

    def join(self, others: list[Tiles]) -> Tiles:
        """With the tiles of others of the same kind."""
        parts = [self, *others]
        return replace(
            self,
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zeros=_joined([part.zeros for part in parts]),
            lows=_joined([part.lows for part in parts]),
            outer_scales=_joined([part.outer_scales for part in parts]),
            outer_lows=_joined([part.outer_lows for part in parts]),
        )


def _together(tokens: int, counts: tuple[int, ...]) -> int:
    """How many at a time take least: decoding costs about as much as one token more."""
    return min(sorted(counts, reverse=True), key=lambda count: -(-tokens // count) * (count + 1))


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def tiles_of(weight: QuantizedWeight) -> Tiles | None:
    """Of a weight whose groups are contiguous and all of one size; None where they are no whole steps, and for FP8."""
    if not installed.can_compile():
        return None
    if isinstance(weight, IntegerWeight):
        return _of_integers(weight)
    if isinstance(weight, CodebookWeight):
        return _of_table(weight)
    if isinstance(weight, GgufWeight):
        return _of_blocks(weight)
    return _of_bytes(weight) if isinstance(weight, AbsmaxInt8Weight) else None


def _of_integers(weight: IntegerWeight) -> Tiles | None:
    from quantkit.kernels.cpu.processor import this_processor
    from quantkit.kernels.cpu.tiles import PLANES, Codes

    shift = 128 if weight.bits == 8 and this_processor().multiplies_signed else 0
    zero = middle_code(weight.bits) - shift if weight.symmetric else None
    if weight.bits not in PLANES:
        return None
    codes = weight.codes ^ shift if shift else weight.codes
    zeros = None if zero is not None else weight.zeros
    meaning = Codes(weight.bits, zero=zero, zeros_from=shift)
    return _packed(meaning, codes, weight.scales, zeros)


def _of_bytes(weight: AbsmaxInt8Weight) -> Tiles | None:
    """Signed codes with a scale for each output."""
    from quantkit.kernels.cpu.processor import this_processor
    from quantkit.kernels.cpu.tiles import Codes

    signed = this_processor().multiplies_signed
    codes = weight.codes.view(torch.uint8)
    scales = (weight.row_absmax / 127).unsqueeze(-1)
    return _packed(Codes(8, zero=0 if signed else 128), codes if signed else codes ^ 128, scales)


def _of_table(weight: CodebookWeight) -> Tiles | None:
    from quantkit.kernels.cpu.tiles import Codes

    values = table_of(weight.kind)
    if weight.kind == "e2m1":  # halves are whole numbers
        digits, scale = [(2 * values).round().int()], 0.5
    else:
        last = (values.double() * _THREE_DIGITS).round().int()
        middle = (last + 128) >> 8
        first = (middle + 128) >> 8
        digits, scale = [first, middle - (first << 8), last - (middle << 8)], 1 / _THREE_DIGITS
    meaning = Codes(4, digits=tuple(tuple(digit.tolist()) for digit in digits), scale=scale)
    return _packed(meaning, weight.codes.view(weight.shape), weight.block_scales.view(weight.shape[0], -1))


def _of_blocks(weight: GgufWeight) -> Tiles | None:
    """Small scales and minimums stay whole numbers where a block has several."""
    from quantkit.kernels.cpu.processor import this_processor
    from quantkit.kernels.cpu.tiles import PLANES, Codes, by_tile

    kind = weight.kind
    shift = 128 if kind.bits == 8 and this_processor().multiplies_signed else 0
    codes = weight.codes ^ shift if shift else weight.codes
    # A plane of one bit needs steps of 32 inputs.
    bits = kind.bits if weight.group % 32 == 0 or 1 not in PLANES[kind.bits] else _WIDER[kind.bits]
    meaning = Codes(4, digits=(kind.table,)) if kind.table else Codes(bits, zero=kind.zero - shift)
    outer_scales = outer_lows = None
    if weight.scales is None:
        scales, lows = weight.scale, weight.minimum
    elif weight.block > weight.group:
        scales, lows, outer_scales = weight.scales, weight.mins, weight.scale
        outer_lows = None if weight.minimum is None else -weight.minimum
    else:  # a cut went through blocks
        scales, lows = weight.group_scales, weight.group_lows
    packed = _packed(meaning, codes, scales)
    lows, outer_scales, outer_lows = (
        None if part is None else by_tile(part) for part in (lows, outer_scales, outer_lows)
    )
    return packed and replace(packed, lows=lows, outer_scales=outer_scales, outer_lows=outer_lows)


def _packed(meaning: Codes, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tiles | None:
    from quantkit.kernels.cpu.tiles import by_tile, pack

    inputs, groups = codes.shape[1], scales.shape[1]
    group = inputs // groups if groups > 1 else padded(inputs, _LARGEST_BLOCK if inputs > _SHORT else 32)
    block = _block(group)
    if block is None or (block % 32 and 1 in meaning.planes):
        return None
    meaning = replace(meaning, step=16 if block % 32 else 32)
    codes = pad(codes, (0, groups * group - inputs))
    zeros = None if zeros is None else by_tile(zeros)
    return Tiles(meaning, pack(codes, meaning), by_tile(scales), zeros, group, block)


def _block(group: int) -> int | None:
    """The largest that divides a group into whole steps."""
    return next((size for size in range(_LARGEST_BLOCK, 0, -16) if group % size == 0), None)


def multiply(
    x: Tensor, tiles: Tiles, bias: Tensor | None, y: Tensor, *, digits: int, rounding: InputRounding | None = None
) -> None:
    """y [tokens, outputs] = x @ weight.T + bias, rows of y contiguous, in x's dtype, of which so many digits are used;
    one where a format says how x is rounded."""
    from quantkit.kernels.cpu.activations import in_digits
    from quantkit.kernels.cpu.pool import shared_pool
    from quantkit.kernels.cpu.token_rounding import find_outliers, in_one_digit

    pool, tokens = shared_pool(), y.shape[0]
    threshold = None if rounding is None else rounding.outlier_threshold
    plan = tiles.plan(digits, tokens, y.shape[1], y.dtype, pool.threads, threshold is not None)
    outliers = None if threshold is None else find_outliers(pool, x, threshold, plan.inputs)
    if rounding is None:
        held = in_digits(pool, x, digits, tiles.block, plan.room, plan.inputs, tiles.every if digits == 1 else 1)
    else:
        held = in_one_digit(pool, x, outliers, tiles.block, plan.room, plan.inputs)
    own = [held.values, plan.room, held.scales, held.sums, 0 if bias is None else bias.data_ptr(), y.data_ptr()]
    last = [y.stride(0), 0 if outliers is None else outliers.head]
    pool.run(plan.kernel, [*plan.weight, *own, tokens, *plan.sizes, *last], plan.pieces)
