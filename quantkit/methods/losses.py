"""What rounding costs on a layer's outputs, from H = sum of x x^T over its calibration inputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.formats import IntegerWeight, QuantizedWeight


def output_loss(weight: Tensor, quantized: QuantizedWeight, hessian: Tensor) -> Tensor:
    """Squared error of each output [out], summed over the calibration inputs.

    With several H [layers, in, in] the outputs of as many layers are stacked.
    """
    error = weight.float() - quantized.dequantize()
    return (_times(error, hessian) * error).sum(-1)


def output_energy(weight: Tensor, hessian: Tensor) -> Tensor:
    """Square of each output [out], summed over the calibration inputs; stacked as for `output_loss`."""
    weight = weight.float()
    return (_times(weight, hessian) * weight).sum(-1)


def _times(rows: Tensor, hessian: Tensor) -> Tensor:
    if hessian.ndim == 2:
        return rows @ hessian
    return torch.bmm(rows.unflatten(0, (len(hessian), -1)), hessian).flatten(0, 1)


def better_rows(
    one: IntegerWeight, one_loss: Tensor, other: IntegerWeight, other_loss: Tensor
) -> tuple[IntegerWeight, Tensor]:
    """Row by row the one that costs less; rows do not depend on each other."""
    first = one_loss <= other_loss
    pick = first[:, None]
    chosen = replace(
        one,
        codes=torch.where(pick, one.codes, other.codes),
        scales=torch.where(pick, one.scales, other.scales),
        zeros=torch.where(pick, one.zeros, other.zeros),
    )
    return chosen, torch.where(first, one_loss, other_loss)
