"""Blocks whose weights are scale times code less a minimum.

Of a group, scale and minimum that suit its codes best follow from sums over the group (least squares in two unknowns).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats.gguf.blocks import Blocks
from quantkit.formats.gguf.symmetric import fit_small
from quantkit.formats.gguf.types import BlockType

_ROUNDS = 2
_RANGES = tuple(-1.0 + 0.1 * step for step in range(20))  # by how many codes the range is stretched


def search_shifted(weight: Tensor, columns: Tensor, kind: BlockType) -> Blocks:
    """Of a piece [rows, blocks, size] whose columns matter so much [blocks, size]."""
    top = (1 << kind.bits) - 1
    groups = weight.unflatten(2, (kind.groups, kind.group))  # [rows, blocks, groups, group]
    matter = columns.unflatten(1, (kind.groups, kind.group))
    scales, lows, weights = _best_lines(groups, matter, top, only_below=kind.has_groups)
    if not kind.has_groups:
        scale, low = (value.squeeze(-1).half().float() for value in (scales, lows))
        codes = _codes(weight, scale.unsqueeze(-1), low.unsqueeze(-1), top)
        return Blocks(codes.to(torch.uint8), scale.half(), low.half())
    most = 63 if kind.pairs_at is not None else 15
    scale, small = fit_small(scales, weights, (0, most))
    minimum, mins = fit_small(-lows, matter.sum(-1).expand_as(lows), (0, most))
    scale, minimum = scale.half().float(), minimum.half().float()
    for _ in range(_ROUNDS):
        small, mins, codes = _best_neighbours(groups, matter, scale, minimum, small, mins, top, most)
        scale, minimum = _refitted(groups, matter, codes, small, mins, scale, minimum)
        scale, minimum = scale.half().float(), minimum.half().float()
    steps, lows = scale.unsqueeze(-1) * small, -minimum.unsqueeze(-1) * mins
    codes = _codes(groups, steps.unsqueeze(-1), lows.unsqueeze(-1), top).flatten(2)
    return Blocks(codes.to(torch.uint8), scale.half(), minimum.half(), small.to(torch.int8), mins.to(torch.int8))


def _best_lines(groups: Tensor, matter: Tensor, top: int, only_below: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The scale and what is added [..., groups] of every group for itself, and how much an error of the scale counts.

    `only_below`: nothing above 0 can be added.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if only_below:
        low, high = low.clamp(max=0), high.clamp(min=0)
    reach = high - low
    total = matter.sum(-1)
    fed = groups * matter
    sum_fed = fed.sum(-1)
    least = torch.full_like(sum_fed, float("inf"))
    scale, added, weights = torch.zeros_like(least), low.squeeze(-1), torch.ones_like(least)
    shifted = groups - low
    for stretch in _RANGES:
        inverse = torch.where(reach == 0, 0.0, (top + stretch) / reach)
        codes = (shifted * inverse).round_().clamp_(0, top)
        heavy = codes * matter
        ones, squares, products = heavy.sum(-1), (heavy * codes).sum(-1), (fed * codes).sum(-1)
        line, start = _line(total, ones, squares, products, sum_fed, only_below)
        error = _error(line, start, total, ones, squares, products, sum_fed)
        better = error < least
        least = torch.where(better, error, least)
        scale, added = torch.where(better, line, scale), torch.where(better, start, added)
        weights = torch.where(better, squares, weights)
    return scale, added, weights


def _line(
    total: Tensor, ones: Tensor, squares: Tensor, products: Tensor, fed: Tensor, only_below: bool
) -> tuple[Tensor, Tensor]:
    """Scale and start of the best line through the weights over their codes."""
    determinant = total * squares - ones.square()
    sure = determinant > 1e-12 * total * squares.clamp(min=1e-30)
    safe = torch.where(sure, determinant, 1.0)
    line = torch.where(sure, (total * products - fed * ones) / safe, 0.0)
    start = torch.where(sure, (squares * fed - ones * products) / safe, fed / total)
    if only_below:
        above = start > 0
        line = torch.where(above, products / squares.clamp(min=1e-30), line)
        start = torch.where(above, 0.0, start)
    return line.clamp_(min=0), start


def _error(
    line: Tensor, start: Tensor, total: Tensor, ones: Tensor, squares: Tensor, products: Tensor, fed: Tensor
) -> Tensor:
    """The weighted error of a line, but for what no line changes."""
    cross = line * start * ones - line * products - start * fed
    return line.square() * squares + start.square() * total + 2 * cross


def _best_neighbours(
    groups: Tensor,
    matter: Tensor,
    scale: Tensor,
    minimum: Tensor,
    small: Tensor,
    mins: Tensor,
    top: int,
    most: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Small scales and minimums, each one up, one down or as it is, as costs a group least; and the codes then."""
    least = torch.full_like(small, float("inf"))
    found, found_mins, chosen = small, mins, torch.empty_like(groups)
    for step in (0, -1, 1):
        for shift in (0, -1, 1):
            tried, tried_mins = (small + step).clamp(0, most), (mins + shift).clamp(0, most)
            size = (scale.unsqueeze(-1) * tried).unsqueeze(-1)
            low = (-minimum.unsqueeze(-1) * tried_mins).unsqueeze(-1)
            codes = _codes(groups, size, low, top)
            error = (codes * size).add_(low).sub_(groups).square_().mul_(matter).sum(-1)
            better = error < least
            least, found = torch.where(better, error, least), torch.where(better, tried, found)
            found_mins = torch.where(better, tried_mins, found_mins)
            chosen = torch.where(better.unsqueeze(-1), codes, chosen)
    return found, found_mins, chosen


def _refitted(
    groups: Tensor, matter: Tensor, codes: Tensor, small: Tensor, mins: Tensor, scale: Tensor, minimum: Tensor
) -> tuple[Tensor, Tensor]:
    """Scale and minimum [...] of a block that suit these codes and small numbers best."""
    up, down = codes * small.unsqueeze(-1), -mins.unsqueeze(-1).expand_as(codes)

    def total(one: Tensor, other: Tensor) -> Tensor:
        return (one * other).mul_(matter).sum((-1, -2))

    upper, lower, both = total(up, up), total(down, down), total(up, down)
    fed_up, fed_down = total(up, groups), total(down, groups)
    determinant = upper * lower - both.square()
    sure = determinant > 1e-9 * upper * lower.clamp(min=1e-30)
    safe = torch.where(sure, determinant, 1.0)
    new_scale = torch.where(sure, (fed_up * lower - fed_down * both) / safe, scale)
    new_minimum = torch.where(sure, (fed_down * upper - fed_up * both) / safe, minimum)
    alone = (lower == 0) & (upper > 0)
    return torch.where(alone, fed_up / upper.clamp(min=1e-30), new_scale), new_minimum


def _codes(weight: Tensor, scale: Tensor, low: Tensor, top: int) -> Tensor:
    """float32: the nearest codes."""
    return ((weight - low) * torch.where(scale == 0, 0.0, 1.0 / scale)).round_().clamp_(0, top)
