"""What products with packed codes are compiled for, and what they are given."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quantkit.kernels.cpu.language import Value
from quantkit.kernels.cpu.tiles import ROWS, Codes


class Arguments(NamedTuple):
    """Addresses and sizes, in their order."""

    codes: Value
    scales: Value
    zeros: Value
    x: Value
    x_tokens: Value  # that x has room for, which is where its next digit begins
    x_scales: Value
    x_sums: Value
    bias: Value  # 0: none
    y: Value
    tokens: Value
    outputs: Value
    inputs: Value  # of the codes and digits: padded
    groups: Value  # of a row of the weight
    blocks: Value  # of x in a group of the weight
    tiles: Value  # of a piece of work
    lows: Value  # what is added to every weight of a group, like its scale
    outer_scales: Value  # that several groups share, in `Kind.every`
    outer_lows: Value
    y_stride: Value
    outliers: Value  # the head of `token_rounding.Outliers`, where x has them


class Kind(NamedTuple):
    """What kernels are compiled for."""

    codes: Codes
    block: int  # inputs of x that share a scale
    digits: int  # of x
    tokens: int  # at a time
    dtype: torch.dtype  # of y and bias
    scales: torch.dtype
    every: int = 1  # groups that share an outer scale, and an outer low; 1: a scale is all that a group has
    lows: torch.dtype | None = None
    outliers: bool = False  # columns of x are multiplied as they are: codes of 8 bits with one scale a row
    wide: bool = False  # codes are decoded for many tokens at once (`wide_product.py`)
    rows: int = ROWS  # outputs at a time: of a tile all, or half of them where a processor has registers for no more

    @property
    def whole_scales(self) -> bool:
        """Whether small scales are multiplied as whole numbers: all sums fit 32 bits."""
        return self.every > 1 and self.digits == 1

    @property
    def sums(self) -> int:
        return max(self.digits, self.codes.used(self.digits))

    @property
    def unit(self) -> float:
        """What the last sum counts, beside scales."""
        used = self.codes.used(self.digits)
        return self.codes.unit(used) * 256.0 ** (used + self.digits - 1 - self.sums)
