"""SmoothQuant: move activation outliers into the weights, for formats that round both (Xiao et al., 2022).

Inputs are divided and weight columns multiplied by s = activation^a / weight^(1 - a), from the largest magnitudes of
both. The migration strength a is searched: the one with the least measured error of the outputs, both sides rounded as
an engine will, on a sample of calibration inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Format
from quantkit.methods.awq import LARGEST, ScaleChoice


def search_scales(
    weight: Tensor, fmt: Format, absmax: Tensor, sample: Tensor, points: int, tie: Callable[[Tensor], Tensor]
) -> ScaleChoice:
    """The best scales for the stacked weights [out, in]; `absmax` [in] and `sample` [tokens, in] of their inputs."""
    exact = sample @ weight.float().T
    energy = max(float(exact.square().sum()), 1e-30)
    best = torch.ones_like(absmax)
    identity = least = _loss(weight, best, fmt, sample, exact) / energy
    if not math.isfinite(energy + identity):
        raise InputError("the loss is not finite; the model's weights or activations overflow")
    for scales in candidates(weight, absmax, points):
        tied = tie(scales)
        loss = _loss(weight, tied, fmt, sample, exact) / energy
        if loss < least:
            best, least = tied, loss
    return ScaleChoice(best, least, identity)


def candidates(weight: Tensor, absmax: Tensor, points: int) -> Iterator[Tensor]:
    """Scales of geometric mean 1 for migration strengths from 0 to 1."""
    activation = absmax.clamp(min=float(absmax.max()) * 1e-6 + 1e-30)
    columns = weight.float().abs().amax(0)
    columns = columns.clamp(min=float(columns.max()) * 1e-6 + 1e-30)
    for point in range(points + 1):
        strength = point / points
        scales = activation**strength / columns ** (1 - strength)
        yield (scales / scales.log().mean().exp()).clamp(1 / LARGEST, LARGEST)


def _loss(weight: Tensor, scales: Tensor, fmt: Format, sample: Tensor, exact: Tensor) -> float:
    quantized = fmt.quantize(weight.float() * scales)
    inputs = fmt.served_inputs(sample / scales, quantized)
    return float((inputs @ quantized.dequantize().T - exact).square().sum())
