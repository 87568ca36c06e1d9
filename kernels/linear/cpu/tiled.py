"""Linear layers on a CPU from packed codes, by kernels that are compiled for it (`kernels/cpu/product.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quantkit.formats.base import InputRounding
from quantkit.kernels.linear.weight import padded

if TYPE_CHECKING:
    from quantkit.kernels.cpu.tiles import Codes
    from quantkit.kernels.linear.cpu.floats import FloatPlan

TILE_ROWS = 16  # outputs, as `kernels/cpu/tiles.py` has it
_PIECES = 8  # of a product with one token for each thread: who is free takes the next. More tokens have as many more: a
# thread that waits for the last piece of another must not fall asleep


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
REGISTERS = {
    16: Registers((1, 2, 4, 8), (1, 2), 4, (32, 32), halved=8),
    32: Registers((1, 2, 4), (1, 2), 4),
    64: Registers((1, 4, 8), (1,), 8),
}
_NEVER = 1 << 30
WITHOUT_VNNI = REGISTERS[64]._replace(wide_from=(_NEVER, _NEVER))  # products take so long that decoding hardly counts


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
    float_plans: dict[tuple[object, ...], FloatPlan] = field(default_factory=dict, init=False, repr=False)
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
        from quantkit.kernels.cpu.product_kind import Kind
        from quantkit.kernels.cpu.wide_product import kernel

        processor = this_processor()
        late = processor.vector == 64 and processor.dot == "pmaddubsw"
        registers = WITHOUT_VNNI if late else REGISTERS[processor.vector]
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
    def float8(self) -> bool:
        return self.meaning.float8

    @property
    def has_rows(self) -> bool:
        """Whether single rows can be decoded: codes of 8 bits have a byte of their own."""
        return (
            self.meaning.bits == 8
            and not self.float8
            and self.meaning.zero is not None
            and self.lows is self.outer_scales is None
        )

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
