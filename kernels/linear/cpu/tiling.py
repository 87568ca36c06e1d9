"""Weights as tiles of packed codes (`tiled.py`), for the kernels of the CPU that is here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.formats import AbsmaxInt8Weight, CodebookWeight, Float8Weight, GgufWeight, IntegerWeight, QuantizedWeight
from quantkit.formats.codebook import table_of
from quantkit.formats.integer import middle_code
from quantkit.kernels.cpu import installed
from quantkit.kernels.linear.cpu.slabs import scales_by_row
from quantkit.kernels.linear.cpu.tiled import Tiles
from quantkit.kernels.linear.weight import padded

if TYPE_CHECKING:
    from quantkit.kernels.cpu.tiles import Codes

_LARGEST_BLOCK = 128  # inputs of x that share a scale: sums of products fit 32 bits
_SHORT = 1024  # inputs of a row with one scale, up to which it is padded to whole steps and not to whole blocks
_WIDER = {3: 4, 5: 6}  # bits that codes get whose own make planes of one bit
_THREE_DIGITS = 127 * 256 * 256  # the largest value of a table


def tiles_of(weight: QuantizedWeight, dtype: torch.dtype) -> Tiles | None:
    """Of a weight whose groups are contiguous and all of one size, for x of this dtype; None where they are no whole
    steps, and for FP8 where it is multiplied in rows."""
    if not installed.can_compile():
        return None
    if isinstance(weight, Float8Weight):
        return _of_float8(weight, dtype)
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


def _of_float8(weight: Float8Weight, dtype: torch.dtype) -> Tiles | None:
    from quantkit.kernels.cpu import float8_product, tile_product
    from quantkit.kernels.cpu.processor import this_processor
    from quantkit.kernels.cpu.tiles import Codes

    if float8_product.fits(dtype) or not tile_product.takes(this_processor(), 1):
        return None
    return _packed(Codes(8, zero=0, float8=True), weight.values.view(torch.uint8), scales_by_row(weight))


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
