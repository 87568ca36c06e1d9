"""Which grid a group of weights gets: its extremes, or a narrower range that costs less.

A range that cuts off the largest weights makes the steps of all others finer. What it costs is measured where it
matters, on the layer's outputs: e H e^T with the group's own part of H = sum of x x^T (errors of different groups are
taken as independent here).

A symmetric grid has one code more below 0 than above. With a negative scale that code is on the other side; it belongs
to the side of the heavier tail. With few bits both sides are tried.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantkit.formats import IntegerFormat, IntegerWeight
from quantkit.formats.integer import nearest, ranges, round_to_grid

SHRINK = tuple(1.0 - 0.025 * step for step in range(21))  # of the full range: 1.0 down to 0.5
BOTH_SIGNS = 3  # bits up to which either sign of a scale is tried
SIGNED = 7  # bits up to which a scale has a sign; one code of 256 would gain nothing
FITTED = 1 << 20  # grids that are computed together: small layers would spend their time on starting operations


def search_grid(
    weight: Tensor, fmt: IntegerFormat, hessian: Tensor, shrink: tuple[float, ...] = SHRINK
) -> IntegerWeight:  # fmt: skip
    """A weight [out, in], rounded to the nearest code of each group's best grid; `shrink` begins with 1.

    With several H [layers, in, in] the outputs of as many layers are stacked.
    """
    width = fmt.group_width(weight.shape[1])
    blocks = diagonal_blocks(hessian, width).flatten(0, -3)  # [layers * groups, width, width]
    layers = hessian.shape[0] if hessian.ndim == 3 else 1
    count = weight.shape[1] // width
    groups = weight.float().view(layers, -1, count, width).transpose(1, 2).flatten(0, 1).contiguous()
    tried = _grids(*ranges(groups), fmt, shrink)
    scales, zeros = next(tried)
    least = _loss(groups, scales, zeros, fmt.bits, blocks)
    for steps, origins in tried:
        loss = _loss(groups, steps, origins, fmt.bits, blocks)
        better = loss < least
        least = torch.where(better, loss, least)
        scales, zeros = torch.where(better, steps, scales), torch.where(better, origins, zeros)
    scales, zeros = (each.unflatten(0, (layers, count)).transpose(1, 2).reshape(-1, count) for each in (scales, zeros))
    return round_to_grid(weight, scales, zeros, fmt.bits, width)


def _grids(low: Tensor, high: Tensor, fmt: IntegerFormat, shrink: tuple[float, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales and zero points of all ranges and signs, the whole range with positive scales first."""
    signs = _signs(low, high, fmt)
    together = max(1, FITTED // max(1, low.numel()))
    for start in range(0, len(shrink), together):
        ratios = low.new_tensor(shrink[start : start + together]).view(-1, 1, 1)
        for place, (steps, zeros) in enumerate(zip(*fmt.fit(low * ratios, high * ratios), strict=True), start):
            for turn, sign in enumerate(signs):
                whole = place == turn == 0
                yield steps if whole or sign is None else steps * sign.to(steps), zeros


def _signs(low: Tensor, high: Tensor, fmt: IntegerFormat) -> list[Tensor | None]:
    """Those of a group's scale that are tried, for groups with these ends; None: all positive."""
    if not fmt.sym or fmt.bits > SIGNED:
        return [None]
    plus = torch.ones_like(low)
    return [None, -plus] if fmt.bits <= BOTH_SIGNS else [torch.where(high > -low, -plus, plus)]


def diagonal_blocks(hessian: Tensor, width: int) -> Tensor:
    """The blocks [..., groups, width, width] on the diagonal of H [..., in, in]."""
    cut = hessian.unflatten(-1, (-1, width)).unflatten(-3, (-1, width))  # [..., groups, width, groups, width]
    blocks: Tensor = cut.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).contiguous()
    return blocks


def _loss(groups: Tensor, scales: Tensor, zeros: Tensor, bits: int, blocks: Tensor) -> Tensor:
    """e H e^T of every group by itself, [groups, out]."""
    error = nearest(groups, scales.float().unsqueeze(-1), zeros.unsqueeze(-1), bits).sub_(groups)
    return torch.bmm(error, blocks).mul_(error).sum(-1)
