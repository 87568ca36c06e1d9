"""SmoothQuant: move activation outliers into the weights, for formats that round both (Xiao et al., 2022).

Inputs are divided and weight columns multiplied by s = activation^a / weight^(1 - a), from the largest magnitudes of
both. The migration strength a is searched: the one with the least measured error of the outputs, both sides rounded as
an engine will, on a sample of calibration inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Format, IntegerFormat
from quantkit.methods.costing import GroupWork, Speed
from quantkit.methods.method import (
    LARGEST_SCALE,
    Method,
    Rounded,
    ScaleChoice,
    Tie,
    require_integer,
    require_points,
)
from quantkit.methods.statistics import SAMPLE, InputStatistics


@dataclass(frozen=True)
class SmoothQuantMethod(Method):
    """`points` of the search for the migration strength between 0 and 1."""

    name: ClassVar[str] = "smoothquant"
    points: int = 20

    def __post_init__(self) -> None:
        require_points(self.points)

    @property
    def scales_inputs(self) -> bool:
        return True

    def check(self, fmt: Format) -> None:
        if not (isinstance(fmt, IntegerFormat) and fmt.input_rounding):
            raise InputError(
                f"method 'smoothquant' is for 8-bit weights and activations (ct-int8), not for '{fmt.name}'"
            )

    def choose_scales(self, weight: Tensor, fmt: Format, inputs: InputStatistics, tie: Tie) -> ScaleChoice:
        integer = require_integer(self.name, fmt)
        return search_scales(weight, integer, inputs.absmax, inputs.sample, self.points, tie)

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        return Rounded(fmt.quantize(weight))

    def cost_seconds(self, group: GroupWork, tokens: int, speed: Speed) -> float:
        rounding = group.weights * speed.rounding_seconds
        candidate = rounding + 2 * SAMPLE * group.weights / speed.float32_flops  # rounded, and measured on the sample
        return rounding + (self.points + 1) * candidate


def search_scales(weight: Tensor, fmt: Format, absmax: Tensor, sample: Tensor, points: int, tie: Tie) -> ScaleChoice:
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
        yield (scales / scales.log().mean().exp()).clamp(1 / LARGEST_SCALE, LARGEST_SCALE)


def _loss(weight: Tensor, scales: Tensor, fmt: Format, sample: Tensor, exact: Tensor) -> float:
    quantized = fmt.quantize(weight.float() * scales)
    inputs = fmt.served_inputs(sample / scales, quantized)
    return float((inputs @ quantized.dequantize().T - exact).square().sum())
