"""AWQ: make the input columns that matter larger before rounding, and the layer before them smaller (Lin et al., 2023).

Multiplying column j of a weight by s_j and dividing its input by s_j changes nothing, but the rounding error of that
column shrinks by s_j while its group's range grows by less. The scales come from one family, activation^a / weight^b,
and the best member is found by the measured loss tr((W - Q) H (W - Q)^T), the squared error of the layers' outputs
over all calibration inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import IntegerFormat
from quantkit.formats.integer import nearest, ranges
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.losses import output_energy

LARGEST = 1e4  # scales beyond this or its inverse would leave the range of 16-bit norms


@dataclass(frozen=True)
class ScaleChoice:
    """The scales [in] to multiply the columns by, and what they gain."""

    scales: Tensor
    loss: float  # squared error of the outputs, relative to their square
    identity_loss: float  # the same without scales


def search_scales(
    weight: Tensor, fmt: IntegerFormat, hessian: Tensor, points: int, tie: Callable[[Tensor], Tensor]
) -> ScaleChoice:
    """The best scales for the stacked weights [out, in] of layers that share an input.

    `tie` makes scales equal that must be: under grouped-query attention several columns of the output layer are fed by
    one row of the value layer.
    """
    energy = max(float(output_energy(weight, hessian).sum()), 1e-30)
    best = torch.ones(weight.shape[1], device=weight.device)
    identity = least = _loss(weight, best, fmt, hessian) / energy
    if not math.isfinite(energy + identity):
        raise InputError("the loss is not finite; the model's weights or activations overflow")
    for scales in candidates(weight, hessian, points, fmt.group_width(weight.shape[1])):
        tied = tie(scales)
        loss = _loss(weight, tied, fmt, hessian) / energy
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
            yield (scales / scales.log().mean().exp()).clamp(1 / LARGEST, LARGEST)


def _loss(weight: Tensor, scales: Tensor, fmt: IntegerFormat, hessian: Tensor) -> float:
    """Squared error of the outputs when the columns are scaled, rounded, and scaled back."""
    groups = (weight.float() * scales).unflatten(1, (-1, fmt.group_width(weight.shape[1])))
    steps, zeros = fmt.fit(*ranges(groups))
    rounded = nearest(groups, steps.float().unsqueeze(-1), zeros.unsqueeze(-1), fmt.bits).flatten(1)
    error = rounded.div_(scales).sub_(weight)
    with fast_products(weight.device):  # only compared with its like
        products = error @ hessian
    return float(products.mul_(error).sum())
