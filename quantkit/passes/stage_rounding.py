"""Rounding the linears of a stage, or of one stage of several experts, and measuring what was lost.

What is measured leaves the device once for all of them: for every number by itself a GPU would run empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Format, IntegerFormat, QuantizedWeight
from quantkit.methods import Method
from quantkit.methods.losses import output_energy
from quantkit.methods.method import Rounded
from quantkit.methods.statistics import InputStatistics
from quantkit.passes.result import distance
from quantkit.stages import Stage


@dataclass(frozen=True)
class Unrounded:
    """The linears of a stage, or of one expert of it (`Stage.by_expert`), with the input scales that they took."""

    stage: Stage
    weights: list[Tensor]  # [out, in], float32
    inputs: InputStatistics
    divisor: Tensor | None  # of what they read
    log: Mapping[str, Any]


@dataclass(frozen=True)
class RoundedLinear:
    """What became of one linear."""

    quantized: QuantizedWeight
    decoded: Tensor
    relative_error: float
    log: Mapping[str, Any]


def round_stages(
    method: Method, stages: Sequence[Unrounded], formats: Sequence[Format], prefix: str
) -> list[list[RoundedLinear]]:
    """The linears of each stage; these are one or the experts of one. `prefix` is for errors, before their names."""
    try:
        rounded = _round(method, stages, formats)
    except InputError as error:
        if len(stages) > 1:  # whose fault it is
            return [round_stages(method, [each], formats, prefix)[0] for each in stages]
        raise InputError(f"{prefix}{stages[0].stage.names[0]}: {error}") from error
    return _measured(stages, rounded, formats, prefix)


def _round(method: Method, stages: Sequence[Unrounded], formats: Sequence[Format]) -> list[list[Rounded]]:
    """Layers that share an input are rounded as one matrix on integer grids, which have no scale beyond one row, and
    where they must share the scale of the whole; these have one format."""
    fmt = formats[0]
    if len(formats) == 1 or not (isinstance(fmt, IntegerFormat) or fmt.scales_tensor):
        by_linear = zip(*(each.weights for each in stages), strict=True)
        found = [_of_all(method, list(weights), one, stages) for weights, one in zip(by_linear, formats, strict=True)]
        return [list(each) for each in zip(*found, strict=True)]
    whole = _of_all(method, [torch.cat(each.weights) for each in stages], fmt, stages)
    sizes = [len(weight) for weight in stages[0].weights]
    return [_apart(each, sizes) for each in whole]


def _of_all(method: Method, weights: list[Tensor], fmt: Format, stages: Sequence[Unrounded]) -> list[Rounded]:
    """A weight of each stage."""
    if len(stages) == 1:
        return [method.round(weights[0], fmt, stages[0].inputs)]
    return method.round_together(weights, fmt, [each.inputs for each in stages])


def _apart(whole: Rounded, sizes: list[int]) -> list[Rounded]:
    none: list[Tensor | None] = [None] * len(sizes)
    losses = none if whole.loss is None else list(whole.loss.split(sizes))
    plain = none if whole.rounding_loss is None else list(whole.rounding_loss.split(sizes))
    parts = zip(whole.quantized.split_rows(sizes), losses, plain, strict=True)
    return [Rounded(quantized, loss, rounding, whole.notes) for quantized, loss, rounding in parts]


def _measured(
    stages: Sequence[Unrounded], rounded: list[list[Rounded]], formats: Sequence[Format], prefix: str
) -> list[list[RoundedLinear]]:
    decoded, numbers = list[tuple[QuantizedWeight, Tensor]](), list[list[Tensor]]()
    for one, parts in zip(stages, rounded, strict=True):
        largest = one.inputs.absmax.amax()
        for weight, fmt, part in zip(one.weights, formats, parts, strict=True):
            quantized = fmt.with_input_scale(part.quantized, largest)
            decoded.append((quantized, quantized.dequantize()))
            numbers.append([distance(decoded[-1][1], weight), *_sums(part, weight, one.inputs)])
    linears = zip(decoded, _as_floats(numbers), strict=True)
    found: list[list[RoundedLinear]] = []
    for one, parts in zip(stages, rounded, strict=True):
        found.append([])
        for fmt, part, ((quantized, weight), (error, *sums)) in zip(formats, parts, linears, strict=False):
            log = dict(one.log) | dict(part.notes or {}) | _losses(sums, f"{prefix}{one.stage.names[0]}")
            found[-1].append(RoundedLinear(quantized, weight, error, log | _outliers(fmt, one.inputs)))
    return found


def _as_floats(numbers: list[list[Tensor]]) -> Iterator[list[float]]:
    values = iter(torch.stack([each for line in numbers for each in line]).tolist())
    return ([next(values) for _ in line] for line in numbers)


def _sums(rounded: Rounded, weight: Tensor, inputs: InputStatistics) -> list[Tensor]:
    """Over all outputs, where H is known: the loss, that of plain rounding, and the outputs' energy."""
    if rounded.loss is None or rounded.rounding_loss is None:
        return []
    energy = output_energy(weight, inputs.require_hessian()).sum()
    return [rounded.loss.sum(), rounded.rounding_loss.sum(), energy]


def _losses(sums: Sequence[float], where: str) -> dict[str, float]:
    """Losses relative to the outputs' energy, so that layers compare."""
    if not sums:
        return {}
    loss, plain, energy = sums
    energy = max(energy, 1e-30)
    if not math.isfinite(loss / energy):
        raise InputError(f"{where}: the loss is not finite; the model's weights or activations overflow")
    return {"loss": loss / energy, "rounding_loss": plain / energy}


def _outliers(fmt: Format, inputs: InputStatistics) -> dict[str, list[int]]:
    """The input columns that will be multiplied in 16 bits, as calibration saw them, where a format knows outliers."""
    rounding = fmt.input_rounding
    if rounding is None or rounding.outlier_threshold is None:
        return {}
    return {"outlier_columns": (inputs.absmax >= rounding.outlier_threshold).nonzero().flatten().tolist()}
