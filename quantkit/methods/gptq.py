"""GPTQ: round column by column, and let the columns not yet rounded make up for each error (Frantar et al., 2022).

For a layer with inputs x the loss of rounded weights Q is tr((W - Q) H (W - Q)^T) with H = sum of x x^T. Columns are
taken in the order of their diagonal entry in H, largest first. The groups' scales are fixed before the columns are
reordered, so the order costs nothing at run time: groups stay contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Format, IntegerFormat, IntegerWeight

BLOCK = 128  # columns whose updates are applied to the rest in one matrix product


@dataclass(frozen=True)
class GptqResult:
    """The rounded weight, its loss and plain rounding's, and the damping that was needed."""

    quantized: IntegerWeight
    loss: float  # mean squared error of the layer's outputs, relative to their mean square
    rounding_loss: float  # the same for plain rounding
    damping: float  # as a share of H's mean diagonal


class Hessian:
    """Collects H = sum of x x^T over calibration inputs, in float32."""

    def __init__(self, inputs: int, device: torch.device | None = None) -> None:
        self.matrix = torch.zeros(inputs, inputs, device=device)
        self.tokens = 0

    def add(self, inputs: Tensor) -> None:
        """Inputs [..., in] of the layer."""
        flat = inputs.flatten(0, -2).float()
        self.matrix.addmm_(flat.T, flat)
        self.tokens += flat.shape[0]


def quantize_layer(weight: Tensor, fmt: Format, hessian: Tensor, damping: float = 0.01) -> GptqResult:
    """Rounds a weight [out, in] for a layer whose inputs gave this H [in, in]; never worse than plain rounding."""
    if not isinstance(fmt, IntegerFormat):
        raise InputError(f"method 'gptq' needs a format with an integer grid, not '{fmt.name}'; use method 'rtn'")
    plain = fmt.quantize(weight)
    rounding_loss = output_loss(weight, plain.dequantize(), hessian)
    dead = hessian.diagonal() == 0
    if bool(dead.all()):  # calibration never reached this layer
        return GptqResult(plain, 0.0, 0.0, 0.0)
    order = torch.argsort(hessian.diagonal(), descending=True)
    factor, used = inverse_factor(hessian[order][:, order], dead[order], damping)
    codes = _round_columns(weight.float().masked_fill(dead, 0.0)[:, order], plain, order, factor)
    rounded = torch.empty_like(codes)
    rounded[:, order] = codes
    quantized = IntegerWeight(rounded, plain.scales, plain.zeros, plain.bits, plain.group_size)
    loss = output_loss(weight, quantized.dequantize(), hessian)
    if loss > rounding_loss:  # rare: a layer so easy that compensation only adds noise
        return GptqResult(plain, rounding_loss, rounding_loss, used)
    return GptqResult(quantized, loss, rounding_loss, used)


def output_loss(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """Squared error of the layer's outputs over their square, summed over the calibration inputs."""
    error = weight.float() - rounded
    whole = weight.float()
    scale = float(((whole @ hessian) * whole).sum())
    return float(((error @ hessian) * error).sum()) / max(scale, 1e-30)


def inverse_factor(hessian: Tensor, dead: Tensor, damping: float) -> tuple[Tensor, float]:
    """The upper Cholesky factor of (H + damping)^-1; the damping grows tenfold until it exists."""
    base = hessian.clone()
    diagonal = base.diagonal()
    diagonal[dead] = 1.0  # inputs that are always zero: any weight will do
    mean = diagonal.mean()
    while damping <= 1.0:
        damped = base.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(failed) and bool(torch.isfinite(upper).all()):
                return upper, damping
        damping *= 10
    raise InputError("the inputs of this layer are not finite or not usable for GPTQ; use method 'rtn' for it")


def _round_columns(weight: Tensor, grid: IntegerWeight, order: Tensor, factor: Tensor) -> Tensor:
    """Codes [out, in] of the columns in the given order. Changes `weight`, which is a copy."""
    group = grid.input_groups()[order]
    scales, zeros = grid.scales.float(), grid.zeros.float()
    top = (1 << grid.bits) - 1
    codes = torch.empty_like(weight, dtype=torch.uint8)
    for start in range(0, weight.shape[1], BLOCK):
        end = min(start + BLOCK, weight.shape[1])
        errors = torch.zeros_like(weight[:, start:end])
        for column in range(start, end):
            scale, zero = scales[:, group[column]], zeros[:, group[column]]
            code = (torch.round(weight[:, column] / scale) + zero).clamp_(0, top)
            error = (weight[:, column] - scale * (code - zero)) / factor[column, column]
            weight[:, column:end] -= error.unsqueeze(1) * factor[column, column:end]
            codes[:, column] = code.to(torch.uint8)
            errors[:, column - start] = error
        weight[:, end:] -= errors @ factor[start:end, end:]
    return codes
