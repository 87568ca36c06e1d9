"""Codes and grid of one linear as numbers that can be learned: an offset for every weight, the ends of every group.

With a group's step s and zero point z, a weight w becomes s * (clamp(round(w / s + v) + z) - z). Learned are v, one for
every weight, and the ends of the range that s and z follow from. Rounding has no slope; gradients pass through it as if
it were not there ("straight through"), but for codes that the clamp holds.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from quantkit.formats import IntegerFormat, IntegerWeight
from quantkit.formats.base import DTYPES
from quantkit.formats.integer import round_scales
from quantkit.kernels.reference import learned_grid as reference

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
        self._kernels = _kernels(self.anchors)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.offsets, *self.ends]

    @torch.no_grad()
    def decode_to(self, weight: Tensor) -> None:
        """Writes what the parameters stand for now to a weight [out, in]."""
        self._kernels.decode(self.anchors, self.offsets, *self._grid(self.ends), self._top, weight)

    @torch.no_grad()
    def rounded(self) -> IntegerWeight:
        """The same as codes."""
        scales, zeros = self._grid(self.ends)
        codes = reference.unclamped(self.anchors, self.offsets, scales, zeros).clamp_(0, self._top)
        stored = round_scales(scales, DTYPES[self._fmt.dtype])
        whole = codes.to(torch.uint8).flatten(1)
        return IntegerWeight(whole, stored, zeros.to(torch.uint8), self._start.bits, self._start.group_size)

    def gradients(self, upstream: Tensor) -> list[Tensor]:
        """Of `parameters`, from the gradient [out, in] of the decoded weight; in closed form where weights are many."""
        ends = [each.detach().requires_grad_() for each in self.ends]
        with torch.enable_grad():
            grid = self._grid(ends)
        with torch.no_grad():
            scales, zeros = (each.detach() for each in grid)
            of_offsets, *of_grid = self._kernels.gradients(
                upstream, self.anchors, self.offsets, scales, zeros, self._top
            )
        learned = [(gradient, each) for gradient, each in zip(of_grid, grid, strict=True) if each.requires_grad]
        of_ends = torch.autograd.grad([each for _, each in learned], ends, [gradient for gradient, _ in learned])
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


def _kernels(anchors: Tensor) -> ModuleType:
    """What touches every weight: kernels on a GPU, plain torch elsewhere and for groups too large for them."""
    if not anchors.is_cuda:
        return reference
    from quantkit.kernels import learned_grid

    return learned_grid if anchors.shape[-1] <= learned_grid.LARGEST_GROUP else reference


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
