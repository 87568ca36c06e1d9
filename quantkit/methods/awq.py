"""AWQ: make the input columns that matter larger before rounding, and the layer before them smaller (Lin et al., 2023).

Multiplying column j of a weight by s_j and dividing its input by s_j changes nothing, but the rounding error of that
column shrinks by s_j while its group's range grows by less. The scales come from one family, activation^a / weight^b,
and the best member is found by the measured loss tr((W - Q) H (W - Q)^T), the squared error of the layers' outputs
over all calibration inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Format, IntegerFormat, IntegerWeight
from quantkit.formats.integer import nearest, ranges
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.costing import GroupWork, Speed
from quantkit.methods.grid import SHRINK, search_grid
from quantkit.methods.losses import better_rows, output_energy, output_loss
from quantkit.methods.method import (
    LARGEST_SCALE,
    UNREACHED,
    Method,
    Rounded,
    ScaleChoice,
    Tie,
    require_integer,
    require_points,
)
from quantkit.methods.statistics import InputStatistics

COARSE = SHRINK[::4]  # ranges of a group that candidates are compared with: 1.0 down to 0.5
MOST_OUTPUTS = 4096  # that candidates are compared on


@dataclass(frozen=True)
class AwqMethod(Method):
    """`points` of the scale search between identity and full strength; `clip`: search each group's range too."""

    name: ClassVar[str] = "awq"
    points: int = 20
    clip: bool = True

    def __post_init__(self) -> None:
        require_points(self.points)

    @property
    def wants_hessian(self) -> bool:
        return True

    @property
    def scales_inputs(self) -> bool:
        return True

    @property
    def searches_grid(self) -> bool:
        return True

    def choose_scales(self, weight: Tensor, fmt: Format, inputs: InputStatistics, tie: Tie) -> ScaleChoice:
        fmt, hessian = require_integer(self.name, fmt), inputs.require_hessian()
        return search_scales(weight, fmt, hessian, self.points, tie, searched=self.clip)

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        fmt, hessian = require_integer(self.name, fmt), inputs.require_hessian()
        plain: IntegerWeight = fmt.quantize(weight)
        plain_loss = output_loss(weight, plain, hessian)
        if not bool(hessian.diagonal().any()):
            return Rounded(plain, plain_loss, plain_loss, {"warning": UNREACHED})
        if not self.clip:
            return Rounded(plain, plain_loss, plain_loss)
        clipped = search_grid(weight, fmt, hessian)
        quantized, loss = better_rows(clipped, output_loss(weight, clipped, hessian), plain, plain_loss)
        return Rounded(quantized, loss, plain_loss)

    def cost_seconds(self, group: GroupWork, tokens: int, speed: Speed) -> float:
        rounding = group.weights * speed.rounding_seconds
        losses = 2 * group.hessian_flops / speed.float32_flops
        clipping = len(SHRINK) * 2 * rounding if self.clip else 0.0
        return rounding + losses + self.search_seconds(group, speed) + clipping

    def search_seconds(self, group: GroupWork, speed: Speed) -> float:
        """Candidates for input scales, each rounded and measured."""
        ranges_tried = len(COARSE) if self.clip else 1
        each = ranges_tried * group.weights * speed.rounding_seconds + group.hessian_flops / speed.float32_flops
        return 2 * self.points * each


def search_scales(
    weight: Tensor, fmt: IntegerFormat, hessian: Tensor, points: int, tie: Tie, *, searched: bool = False
) -> ScaleChoice:
    """The best scales for the stacked weights [out, in] of layers that share an input.

    `searched`: each group's range will be searched, so the candidates are compared that way. Of many outputs, evenly
    spaced ones are looked at.
    """
    weight = weight[:: -(-len(weight) // MOST_OUTPUTS)]
    energy = max(float(output_energy(weight, hessian).sum()), 1e-30)
    best = torch.ones(weight.shape[1], device=weight.device)
    identity = least = _loss(weight, best, fmt, hessian, searched) / energy
    if not math.isfinite(energy + identity):
        raise InputError("the loss is not finite; the model's weights or activations overflow")
    for scales in candidates(weight, hessian, points, fmt.group_width(weight.shape[1])):
        tied = tie(scales)
        loss = _loss(weight, tied, fmt, hessian, searched) / energy
        if loss < least:
            best, least = tied, loss
    return ScaleChoice(best, least, identity)


def candidates(weight: Tensor, hessian: Tensor, points: int, group: int) -> Iterator[Tensor]:
    """Scales activation^r and activation^r / weight^(1 - r) for r from 0 to 1, of geometric mean 1."""
    activation = hessian.diagonal().clamp(min=0).sqrt()
    activation = activation.clamp(min=float(activation.max()) * 1e-6 + 1e-30)
    relative = weight.float().abs().unflatten(1, (-1, group))
    relative = (relative / relative.amax(-1, keepdim=True).clamp(min=1e-12)).flatten(1).mean(0).clamp(min=1e-6)
    for point in range(points + 1):
        ratio = point / points
        for divisor in (torch.ones_like(relative), relative ** (1 - ratio)):
            scales = activation**ratio / divisor
            yield (scales / scales.log().mean().exp()).clamp(1 / LARGEST_SCALE, LARGEST_SCALE)


def _loss(weight: Tensor, scales: Tensor, fmt: IntegerFormat, hessian: Tensor, searched: bool) -> float:
    """Squared error of the outputs when the columns are scaled, rounded, and scaled back."""
    scaled = weight.float() * scales
    if searched:
        rounded = search_grid(scaled, fmt, hessian / scales / scales[:, None], COARSE).dequantize()
    else:
        groups = scaled.unflatten(1, (-1, fmt.group_width(weight.shape[1])))
        steps, zeros = fmt.fit(*ranges(groups))
        rounded = nearest(groups, steps.float().unsqueeze(-1), zeros.unsqueeze(-1), fmt.bits).flatten(1)
    error = rounded.div_(scales).sub_(weight)
    with fast_products(weight.device):  # only compared with its like
        products = error @ hessian
    return float(products.mul_(error).sum())
