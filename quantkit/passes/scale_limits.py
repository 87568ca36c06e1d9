"""Which input scales a fold can hold: those with which all that is stored stays in the normal numbers of its dtype.

A row of the layer before that is divided by too much falls below them, where few bits are left, and a column that is
multiplied by too much overflows. Both are far from 1 in bfloat16, and near in float16, which ends at 6e-5 and 65,504.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from quantkit.blocks import weight_of
from quantkit.formats import Format
from quantkit.formats.base import DTYPES
from quantkit.passes.folding import column_scales, producer_scales


class Limits(NamedTuple):
    """The least and the largest scale of each row or column."""

    low: Tensor
    high: Tensor

    def within(self, other: Limits) -> Limits:
        """Both at once; no scale at all (1) is always allowed."""
        low, high = torch.maximum(self.low, other.low), torch.minimum(self.high, other.high)
        return Limits(low.clamp(max=1.0), high.clamp(min=1.0))

    def of_rows(self, folded: int, head: int) -> Limits:
        """Of columns -> of the rows [folded] that feed them, where heads share values."""
        low, high = (each.view(folded // head, -1, head) for each in self)
        return Limits(low.amax(1).flatten(), high.amin(1).flatten())

    def clamp(self, scales: Tensor, head: int) -> Tensor:
        """Tied scales [columns] within limits of rows."""
        rows = producer_scales(scales, len(self.low), head).clamp(self.low, self.high)
        return column_scales(rows, len(scales), head)


def norm_limits(norm: nn.Module, offset: float, dtype: torch.dtype) -> Limits:
    """Of a norm's outputs. With an offset nothing gets small: what is stored is the difference from it."""
    effective = (weight_of(norm).float() + offset).abs()
    return _limits(effective, effective, 0.0 if offset else torch.finfo(dtype).tiny, torch.finfo(dtype).max)


def row_limits(linear: nn.Module, dtype: torch.dtype) -> Limits:
    """Of the outputs of a linear in 16 bits: the root of their mean square stays a normal number."""
    weight = weight_of(linear).float()
    typical = weight.square().mean(1).sqrt()
    return _limits(typical, weight.abs().amax(1), torch.finfo(dtype).tiny, torch.finfo(dtype).max)


def column_limits(weights: list[Tensor], fmt: Format) -> Limits:
    """Of the inputs of layers that will be rounded: a column neither overflows the steps of its groups nor, alone in
    one, makes them too small."""
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).float()
    kind = torch.finfo(DTYPES[fmt.dtype])
    low = torch.where(largest > 0, kind.tiny * 2**fmt.bits / largest, 0.0)
    return Limits(low, kind.max / largest)


def _limits(least: Tensor, largest: Tensor, tiny: float, top: float) -> Limits:
    """Of what is divided, from the least and largest magnitude of each; any scale where all of it is 0."""
    high = least / tiny if tiny else torch.full_like(least, torch.inf)
    return Limits(largest / top, torch.where(largest > 0, high, torch.inf))
