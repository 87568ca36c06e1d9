"""Blocks whose weights are scale times value: a value is a code less its zero, or stands in a table.

The error of a group with the best scale for its codes is sum(h x x) - sum(h x q)^2 / sum(h q q): the search looks for
the largest of the last term, the gain, and needs no scale for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.formats.gguf.blocks import Blocks
from quantkit.formats.gguf.types import BlockType

_STEPS = 9  # scales tried on either side of the one that fits the largest weight, for either sign
_TABLE_STEPS = 5  # the same of tables, whose search takes longer
_STEP = 0.1  # how far the largest weight moves from one to the next, in codes
_ROUNDS = 2  # of refitting small scales, codes and the block's scale
_FEW_BITS = 6  # above, errors are small wherever the scale lies nearby


@dataclass(frozen=True)
class _Values:
    """What the codes of a type stand for before any scale."""

    kind: BlockType

    @property
    def ends(self) -> tuple[float, float]:
        if self.kind.table:
            return float(self.kind.table[0]), float(self.kind.table[-1])
        lowest = -127 if self.kind.zero == 128 else -self.kind.zero  # files keep -128 too, but no writer uses it
        return float(lowest), float((1 << self.kind.bits) - 1 - self.kind.zero)

    def nearest(self, scaled: Tensor) -> Tensor:
        """float32, of any shape. May write into what it is given."""
        if self.kind.table:
            return self._table(scaled)[self._places(scaled)]
        return scaled.round_().clamp_(*self.ends)

    def codes(self, values: Tensor) -> Tensor:
        if self.kind.table:
            return self._places(values).to(torch.uint8)
        return (values + self.kind.zero).to(torch.uint8)

    def _table(self, like: Tensor) -> Tensor:
        return torch.tensor(self.kind.table, dtype=torch.float32, device=like.device)

    def _places(self, scaled: Tensor) -> Tensor:
        table = self._table(scaled)
        return torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True)


def search_symmetric(weight: Tensor, columns: Tensor, kind: BlockType) -> Blocks:
    """Of a piece [rows, blocks, size] whose columns matter so much [blocks, size]."""
    values = _Values(kind)
    groups = weight.unflatten(2, (kind.groups, kind.group))  # [rows, blocks, groups, group]
    matter = columns.unflatten(1, (kind.groups, kind.group))
    scales, weights = _best_scales(groups, matter, values)
    if not kind.has_groups:
        scale = _half(scales.squeeze(-1))  # [rows, blocks]
        chosen = values.nearest(_divided(weight, scale.unsqueeze(-1)))
        return Blocks(values.codes(chosen), scale.half())
    bits = sum(plane.bits for plane in kind.scales)
    ends = (-(1 << bits - 1), (1 << bits - 1) - 1)
    scale, small = fit_small(scales, weights, ends)
    scale = _half(scale)
    for _ in range(_ROUNDS):
        small, chosen = _best_neighbours(groups, matter, values, scale, small, ends)
        scale = _half(_refitted(groups, matter, chosen, small, scale))
    chosen = values.nearest(_divided(groups, (scale.unsqueeze(-1) * small).unsqueeze(-1)))
    return Blocks(values.codes(chosen.flatten(2)), scale.half(), scales=small.to(torch.int8))


def _best_scales(groups: Tensor, matter: Tensor, values: _Values) -> tuple[Tensor, Tensor]:
    """The scale of every group [..., groups] for itself, and how much an error of it counts."""
    largest = groups.abs().argmax(-1, keepdim=True)
    peak = groups.gather(-1, largest)  # [..., 1], with its sign
    steps = _STEPS if values.kind.bits < _FEW_BITS else 2
    steps = _TABLE_STEPS if values.kind.table else steps
    fed = groups * matter
    best = torch.full_like(peak.squeeze(-1), -1.0)
    scale, weights = torch.zeros_like(best), torch.zeros_like(best)
    for end in values.ends:
        sizes = abs(end) / 8 if values.kind.table else 1.0  # steps of tables are wider than 1
        for step in range(-steps, steps + 1):
            inverse = torch.where(peak == 0, 0.0, (end + _STEP * step * sizes) / peak)
            chosen = values.nearest(groups * inverse)
            products, squares = (fed * chosen).sum(-1), (chosen.square() * matter).sum(-1)
            gain = torch.where(squares > 0, products.square() / squares, 0.0)
            better = gain > best
            best = torch.where(better, gain, best)
            scale = torch.where(better, products / squares.clamp(min=1e-30), scale)
            weights = torch.where(better, squares, weights)
    return scale, weights


def fit_small(scales: Tensor, weights: Tensor, ends: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The scale [...] of a block whose whole multiples come nearest to scales [..., groups], and these multiples."""
    peak = scales.gather(-1, scales.abs().argmax(-1, keepdim=True))
    best = torch.full_like(peak, -1.0)
    found, multiples = torch.zeros_like(peak), torch.zeros_like(scales)
    fed = scales * weights
    for end in ends:
        if end == 0:
            continue
        for part in range(24):  # the largest takes the end of the range, or something up to a third below
            inverse = torch.where(peak == 0, 0.0, end * (1 - part / 72) / peak)
            tried = (scales * inverse).round_().clamp_(*ends)
            products, squares = (fed * tried).sum(-1, keepdim=True), (weights * tried.square()).sum(-1, keepdim=True)
            gain = torch.where(squares > 0, products.square() / squares, 0.0)
            better = gain > best
            best = torch.where(better, gain, best)
            found = torch.where(better, products / squares.clamp(min=1e-30), found)
            multiples = torch.where(better, tried, multiples)
    return found.squeeze(-1), multiples


def _best_neighbours(
    groups: Tensor, matter: Tensor, values: _Values, scale: Tensor, small: Tensor, ends: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Small scales one up, one down or as they are, whichever costs a group least; and the values then."""
    least = torch.full_like(small, float("inf"))
    found, chosen = small, torch.empty_like(groups)
    for step in (0, -1, 1):
        tried = (small + step).clamp(*ends)
        step_size = (scale.unsqueeze(-1) * tried).unsqueeze(-1)
        nearest = values.nearest(_divided(groups, step_size))
        error = (nearest * step_size).sub_(groups).square_().mul_(matter).sum(-1)
        better = error < least
        least, found = torch.where(better, error, least), torch.where(better, tried, found)
        chosen = torch.where(better.unsqueeze(-1), nearest, chosen)
    return found, chosen


def _refitted(groups: Tensor, matter: Tensor, chosen: Tensor, small: Tensor, scale: Tensor) -> Tensor:
    """The block's scale [...] that suits these values and small scales best."""
    whole = chosen * small.unsqueeze(-1)
    squares = (whole.square() * matter).sum((-1, -2))
    return torch.where(squares > 0, (whole * groups).mul_(matter).sum((-1, -2)) / squares.clamp(min=1e-30), scale)


def _divided(weight: Tensor, scale: Tensor) -> Tensor:
    return weight * torch.where(scale == 0, 0.0, 1.0 / scale)


def _half(scale: Tensor) -> Tensor:
    """As the file will have it."""
    return scale.half().float()
