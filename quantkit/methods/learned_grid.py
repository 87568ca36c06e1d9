"""Codes and grid of one linear as numbers that can be learned: an offset for every weight, the ends of every group.

With a group's step s and zero point z, a weight w becomes s * (clamp(round(w / s + v) + z) - z). Learned are v, one for
every weight, and the ends of the range that s and z follow from. Rounding has no slope; gradients pass through it as if
it were not there ("straight through"), but for codes that the clamp holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats import IntegerFormat, IntegerWeight
from quantkit.formats.base import DTYPES
from quantkit.formats.integer import round_scales

# Squared output error of a block of `demo-draft`, W3 g64, after 50 steps from 0.0433: 0.0309 with these three; 0.0371
# with a reach of 1, which moves whole groups off their codes; 0.0481 with weights 0.49 from their codes besides.
LIMIT = 0.5  # of all parameters; offsets are in codes
REACH = 0.2  # of a range's ends, where a parameter is 1: as a share of half the range
NEAR = 0.3  # so far from its code a weight may begin


class LearnedGrid:
    """One linear while it is learned; it begins as exactly what `start` decodes to, with all `parameters` 0."""

    def __init__(self, weight: Tensor, start: IntegerWeight, fmt: IntegerFormat) -> None:
        assert start.group_of is None, "groups stand next to each other"
        self._fmt, self._start, self._top = fmt, start, (1 << start.bits) - 1
        self._scales, self._zeros = start.scales.float(), start.zeros.float()  # [out, groups]
        self.anchors = _anchors(weight, start)  # [out, groups, size]
        self.offsets = torch.zeros_like(self.anchors)
        ends = 1 if fmt.sym else 2  # a symmetric range has both at the same distance
        self.ends = tuple(torch.zeros_like(self._scales) for _ in range(ends))

    @property
    def parameters(self) -> list[Tensor]:
        return [self.offsets, *self.ends]

    @torch.no_grad()
    def decode(self) -> Tensor:
        """The weight [out, in] that the parameters stand for now."""
        return self.rounded().dequantize()

    @torch.no_grad()
    def rounded(self) -> IntegerWeight:
        """The same as codes."""
        scales, zeros = self._grid(self.ends)
        codes = self._unclamped(scales, zeros).clamp_(0, self._top).to(torch.uint8).flatten(1)
        stored = round_scales(scales, DTYPES[self._fmt.dtype])
        return IntegerWeight(codes, stored, zeros.to(torch.uint8), self._start.bits, self._start.group_size)

    def gradients(self, upstream: Tensor) -> list[Tensor]:
        """Of `parameters`, from the gradient [out, in] of the decoded weight; in closed form where weights are many."""
        ends = [each.detach().requires_grad_() for each in self.ends]
        with torch.enable_grad():
            grid = self._grid(ends)
        with torch.no_grad():
            steps, zeros = (each.detach().unsqueeze(-1) for each in grid)
            upstream = upstream.float().view_as(self.anchors)
            codes = self._unclamped(grid[0].detach(), grid[1].detach())
            held = (codes < 0) | (codes > self._top)
            free = upstream.masked_fill(held, 0.0)
            of_offsets = free * steps
            of_steps = (upstream * (codes.clamp_(0, self._top) - zeros) - free * (self.anchors / steps)).sum(-1)
            of_zeros = -((upstream - free) * steps).sum(-1)
        outputs = [(of_steps, grid[0]), (of_zeros, grid[1])]
        learned = [(gradient, output) for gradient, output in outputs if output.requires_grad]
        of_ends = torch.autograd.grad([output for _, output in learned], ends, [gradient for gradient, _ in learned])
        return [of_offsets, *of_ends]

    def _grid(self, ends: tuple[Tensor, ...] | list[Tensor]) -> tuple[Tensor, Tensor]:
        """Scales as they will be stored and whole zero points, both float32 [out, groups]."""
        if self._fmt.sym:
            return _stored(self._scales * (1 + REACH * ends[0]), self._fmt), self._zeros
        half = REACH * self._top / 2
        low = self._scales * (half * ends[0] - self._zeros)
        high = self._scales * (half * ends[1] + (self._top - self._zeros))
        scales = _stored((high - low) / self._top, self._fmt)
        zeros = -low / scales
        return scales, straight_through(zeros, torch.round(zeros)).clamp(self._fmt.zero_floor, self._top)

    def _unclamped(self, scales: Tensor, zeros: Tensor) -> Tensor:
        return torch.round(self.anchors / scales.unsqueeze(-1) + self.offsets).add_(zeros.unsqueeze(-1))


def straight_through(values: Tensor, rounded: Tensor) -> Tensor:
    """The rounded values, with the gradient of the values themselves."""
    return values + (rounded - values).detach()


def _stored(scales: Tensor, fmt: IntegerFormat) -> Tensor:
    return straight_through(scales, round_scales(scales.detach(), DTYPES[fmt.dtype]).float())


def _anchors(weight: Tensor, start: IntegerWeight) -> Tensor:
    """The weights [out, groups, size] to round, moved so far that each rounds to its code in `start`.

    GPTQ gives many weights a code that is not the nearest. Such a weight begins beside its code, on the side that it
    comes from: an offset can take it back. Weights beyond the ends of their grid stay where they are.
    """
    steps, zeros = start.scales.float().unsqueeze(-1), start.zeros.float().unsqueeze(-1)
    codes = start.codes.float().unflatten(1, (-1, start.group_size))
    wanted = weight.float().unflatten(1, (-1, start.group_size)) / steps + zeros
    beyond = ((codes == 0) & (wanted < 0)) | ((codes == (1 << start.bits) - 1) & (wanted > codes))
    near = codes + (wanted - codes).clamp(-NEAR, NEAR)
    return (torch.where(beyond, wanted, near) - zeros) * steps
