"""Any weight rounded once more, to float8 e4m3 with a scale per row: what is multiplied where arithmetic is FP8.

Float8 has 4 significant bits at every size, so a row's scale decides nothing but which of its values fall near to one
that float8 has. Of a few scales that cover the row, within a factor of two, the one with the least squared error is
taken. Of a 4-bit weight in groups of 128 that error is a twentieth of what the weight has already.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantkit.formats.base import QuantizedWeight
from quantkit.formats.ct_float8 import Float8Weight, covering_scales, round_to_float8

_TRIED = 8  # scales of a row: squared errors are 0.81 of those with the smallest one, and 0.73 with 32
_AT_ONCE = 1 << 24  # weights that are decoded to float32


def float8_rows(weight: QuantizedWeight) -> Float8Weight:
    """The weight in float8, its columns in their order."""
    parts = [(round_to_float8(rows, scales), scales) for rows, scales in _decoded(weight)]
    values = torch.cat([part.view(torch.uint8) for part, _ in parts])  # which `cat` takes everywhere
    return Float8Weight(values.view(torch.float8_e4m3fn), torch.cat([scales for _, scales in parts]))


def row_scales(weight: QuantizedWeight) -> Tensor:
    """The scales alone, float32 [out]."""
    return torch.cat([scales for _, scales in _decoded(weight)]).flatten()


def _decoded(weight: QuantizedWeight) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows at a time, and their scales [rows, 1]; both float32."""
    outputs, inputs = weight.shape
    step = max(1, _AT_ONCE // inputs)
    for start in range(0, outputs, step):
        rows = weight.cut(slice(start, min(start + step, outputs)), slice(0, inputs)).dequantize()
        yield rows, _best_scales(rows)


def _best_scales(rows: Tensor) -> Tensor:
    smallest = covering_scales(rows.abs().amax(1, keepdim=True))
    best, least = smallest, torch.full_like(smallest, torch.inf)
    for number in range(_TRIED):
        scales = smallest * 2 ** (number / _TRIED)
        error = (round_to_float8(rows, scales).float() * scales).sub_(rows).square_().sum(1, keepdim=True)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best
