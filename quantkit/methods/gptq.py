"""GPTQ: round column by column, and let the columns not yet rounded make up for each error (Frantar et al., 2022).

For a layer with inputs x the loss of rounded weights Q is tr((W - Q) H (W - Q)^T) with H = sum of x x^T. Columns are
taken in the order of their diagonal entry in H, largest first. The groups' scales are fixed before the columns are
reordered, so the order costs nothing at run time: groups stay contiguous.

Quantized layers before this one changed its inputs, from y in the original model to x. What Q x should be is then W y,
not W x (GPTAQ; Li et al., 2025, arXiv 2504.02692). Without rounding the weight that comes nearest is
W + W D H^-1 with D = sum of (y - x) x^T. Rounding a weight on the way there is the same problem as before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CtPacked, Format, IntegerFormat, IntegerWeight
from quantkit.formats.integer import contiguous_groups
from quantkit.methods.awq import AwqMethod
from quantkit.methods.columns import BLOCK, round_in_order, take_rows
from quantkit.methods.costing import GroupWork, Speed
from quantkit.methods.descent import descend
from quantkit.methods.grid import SHRINK, search_grid
from quantkit.methods.losses import better_rows, output_loss
from quantkit.methods.method import (
    UNREACHED,
    Method,
    Rounded,
    ScaleChoice,
    Tie,
    require_integer,
    require_one_of,
)
from quantkit.methods.statistics import InputStatistics

MOST_SWEEPS = 100
# Of what a weight would need to make up for drift; all of it follows the calibration text too closely
# (docs/explanations/quantization.md, "Few bits"). KL of SmolLM2-135M at 4 bits with 0, 0.5 and 1: 0.091, 0.056, 0.064.
SHARE = 0.5


@dataclass(frozen=True)
class GptqMethod(Method):
    """`order` of the columns: `static` (groups fixed before), `desc_act` (groups follow the order) or `none`.

    `grid`: each group's scale from its extremes (`minmax`), or searched for the least weighted error (`search`).
    `scaling`: `awq` first moves difficulty out of the salient input columns, as method awq does.
    `target` of a layer's outputs: what the original model has there (`model`), or what the original weights make of
    the inputs that quantized layers before leave (`layer`). `sweeps` of coordinate descent over all codes afterwards.
    """

    name: ClassVar[str] = "gptq"
    damping: float = 0.01
    order: str = "static"
    grid: str = "search"
    scaling: str = "none"
    target: str = "model"
    sweeps: int = 0

    def __post_init__(self) -> None:
        require_one_of("order", self.order, ("static", "desc_act", "none"))
        require_one_of("grid", self.grid, ("minmax", "search"))
        require_one_of("scaling", self.scaling, ("none", "awq"))
        require_one_of("target", self.target, ("layer", "model"))
        if not 0 < self.damping <= 1:
            raise InputError(f"damping is {self.damping}, but must be above 0 and at most 1")
        if not 0 <= self.sweeps <= MOST_SWEEPS:
            raise InputError(f"sweeps is {self.sweeps}, but must be 0 to {MOST_SWEEPS}")

    @property
    def wants_hessian(self) -> bool:
        return True

    @property
    def wants_drift(self) -> bool:
        return self.target == "model"

    @property
    def scales_inputs(self) -> bool:
        return self.scaling == "awq"

    @property
    def searches_grid(self) -> bool:
        return self.grid == "search"

    def check(self, fmt: Format) -> None:
        require_integer(self.name, fmt)
        scattered = self.order == "desc_act" and getattr(fmt, "group_size", -1) != -1
        if scattered and not getattr(fmt, "act_order", False):
            raise InputError(
                f"method 'gptq' with order desc_act scatters the groups, which '{fmt.name}' cannot store so; "
                "use format gptq with act_order: true, or order static, which costs nothing at run time"
            )

    def choose_scales(self, weight: Tensor, fmt: Format, inputs: InputStatistics, tie: Tie) -> ScaleChoice:
        return AwqMethod(clip=self.searches_grid).choose_scales(weight, fmt, inputs, tie)

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        drift = inputs.take_drift() if self.wants_drift else None
        owed = None if drift is None else weight.float() @ drift
        del drift  # as large as H: it is gone before H has its factor
        return self._rounded(quantize_layer(weight, fmt, inputs.require_hessian(), self, owed))

    def round_together(
        self, weights: Sequence[Tensor], fmt: Format, inputs: Sequence[InputStatistics]
    ) -> list[Rounded]:
        if self.sweeps or self.order == "desc_act":  # codes that are swept, and groups that differ, one by one
            return super().round_together(weights, fmt, inputs)
        hessians = torch.stack([each.require_hessian() for each in inputs])
        return [self._rounded(result) for result in quantize_layers(torch.cat([*weights]), fmt, hessians, self)]

    def _rounded(self, result: GptqResult) -> Rounded:
        notes: dict[str, float | str] = {"damping": result.damping}
        if result.damping > self.damping:
            notes["damping_reason"] = "H had no Cholesky factor with less"
        if result.damping == 0:
            notes["warning"] = UNREACHED
        return Rounded(result.quantized, result.loss, result.rounding_loss, notes)

    def cost_seconds(self, group: GroupWork, tokens: int, speed: Speed) -> float:
        rounding = group.weights * speed.rounding_seconds
        products = 3 + 2 * self.wants_drift + 2 * self.sweeps  # two losses, updates of later columns, ...
        by_hessian = products * group.hessian_flops / speed.float32_flops
        scaling = AwqMethod(clip=self.searches_grid).search_seconds(group, speed) if self.scales_inputs else 0.0
        search = len(SHRINK) * 2 * rounding if self.searches_grid else 0.0
        inverse = 4 * group.inputs**3 / speed.float32_flops
        columns = (1 + self.sweeps) * group.inputs * _column_seconds(group.outputs, speed)
        return rounding + by_hessian + scaling + search + columns + inverse

    def warnings(self, formats: Collection[Format], widest: int, samples: int, seq_len: int) -> Iterator[str]:
        if samples * seq_len < widest:
            yield (
                f"{samples * seq_len} calibration tokens cannot tell {widest} inputs of a layer apart; take at least "
                f"{math.ceil(widest / max(seq_len, 1))} samples of this length"
            )


def _column_seconds(outputs: int, speed: Speed) -> float:
    """For one column of so many outputs: a share of its own and one for each output, from layers of two heights."""
    few, many = 256, 2048
    low, high = (_measured_column(height, speed) for height in (few, many))
    slope = max(high - low, 0.0) / (many - few)
    return max(low - few * slope, 0.0) + outputs * slope


def _measured_column(outputs: int, speed: Speed) -> float:
    def work() -> object:
        return quantize_layer(weight, CtPacked(bits=4, group_size=BLOCK), hessian)

    weight, hessian = torch.randn(outputs, BLOCK, device=speed.device), torch.eye(BLOCK, device=speed.device)
    return speed.measure(f"gptq, {outputs} outputs", work) / BLOCK


@dataclass(frozen=True)
class GptqResult:
    """The rounded weight with its loss and plain rounding's, row by row, and the damping that was needed."""

    quantized: IntegerWeight
    loss: Tensor  # [out] squared error of each output, summed over the calibration inputs
    rounding_loss: Tensor  # [out] the same for plain rounding
    damping: float  # as a share of H's mean diagonal; 0 where calibration never reached the layer


def quantize_layer(
    weight: Tensor, fmt: Format, hessian: Tensor, method: GptqMethod | None = None, owed: Tensor | None = None
) -> GptqResult:
    """Rounds a weight [out, in] for a layer whose inputs gave this H [in, in]. `owed` is W D [out, in], where inputs
    drifted from exact ones by D.

    No row is worse than plainly rounded, except that rows of scattered groups cannot be exchanged one by one.
    """
    (result,) = quantize_layers(weight, fmt, hessian[None], method, owed)
    return result


def quantize_layers(
    weight: Tensor, fmt: Format, hessians: Tensor, method: GptqMethod | None = None, owed: Tensor | None = None
) -> list[GptqResult]:
    """The same for layers of one shape with their outputs stacked, [layers * out, in], and an H each [layers, in, in].

    `owed`, sweeps and order `desc_act` are for a single one.
    """
    method = method or GptqMethod()
    fmt = require_integer(method.name, fmt)
    layers = len(hessians)
    plain = fmt.quantize(weight)
    rounding_loss = output_loss(weight, plain, hessians)
    if not bool(hessians.diagonal(dim1=1, dim2=2).any(1).all()):  # calibration never reached one of these layers
        if layers == 1:
            return [GptqResult(plain, rounding_loss, rounding_loss, 0.0)]
        alone = zip(weight.chunk(layers), hessians, strict=True)
        return [quantize_layer(each, fmt, hessian, method) for each, hessian in alone]
    order = torch.stack([column_order(hessian, method.order) for hessian in hessians])
    found = [inverse_factor(hessian, each, method.damping) for hessian, each in zip(hessians, order, strict=True)]
    factors, dampings = torch.stack([factor for factor, _ in found]), [damping for _, damping in found]
    del found
    if owed is not None:
        weight = weight.float() + SHARE * _making_up(owed, order[0], factors[0])
        rounding_loss = output_loss(weight, plain, hessians)
    grid = _grid(weight, fmt, hessians, order, method)
    quantized = replace(grid, codes=_round_columns(weight, grid, order, factors))
    loss = output_loss(weight, quantized, hessians)
    if method.sweeps:
        swept = descend(weight, quantized, _damped(hessians[0], dampings[0]), order[0], method.sweeps)
        quantized, loss = better_rows(swept, output_loss(weight, swept, hessians), quantized, loss)
    if quantized.group_of is None:  # a row so easy that compensation only adds noise: rare
        quantized, loss = better_rows(quantized, loss, plain, rounding_loss)
    each_one = quantized.split_rows([len(weight) // layers] * layers)
    return [
        GptqResult(*result)
        for result in zip(each_one, loss.chunk(layers), rounding_loss.chunk(layers), dampings, strict=True)
    ]


def inverse_factor(hessian: Tensor, order: Tensor, damping: float) -> tuple[Tensor, float]:
    """The upper Cholesky factor of (H + damping)^-1 with H's columns in an order, and the damping that was needed.

    The damping grows tenfold until the factor exists. H is the largest thing in memory here: no copy outlives its use.
    """
    diagonal = hessian.diagonal()
    live = diagonal != 0
    mean = float(diagonal[live].mean())
    diagonal = torch.where(live, diagonal, mean)[order]  # inputs that are always zero are rounded by themselves
    while damping <= 1.0:
        damped = hessian[order[:, None], order]
        damped.diagonal().copy_(diagonal + damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not bool(failed):
            inverse = torch.cholesky_inverse(lower)
            del lower
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            del inverse
            if not bool(failed) and bool(torch.isfinite(upper).all()):
                return upper, damping
        damping *= 10
    raise InputError("the inputs of this layer are not finite or not usable for GPTQ; use method 'rtn' for it")


def _making_up(owed: Tensor, order: Tensor, factor: Tensor) -> Tensor:
    """What a weight needs besides to make of its inputs what it makes of exact ones: W D H^-1, H damped."""
    found = torch.empty_like(owed)
    found[:, order] = owed[:, order] @ factor.T @ factor
    return found


def _damped(hessian: Tensor, damping: float) -> Tensor:
    damped = hessian.clone()
    damped.diagonal().add_(damping * hessian.diagonal().mean())
    return damped


def column_order(hessian: Tensor, kind: str) -> Tensor:
    """The order in which columns are rounded."""
    if kind == "none":
        return torch.arange(len(hessian), device=hessian.device)
    return torch.argsort(hessian.diagonal(), descending=True, stable=True)


def _grid(weight: Tensor, fmt: IntegerFormat, hessians: Tensor, order: Tensor, method: GptqMethod) -> IntegerWeight:
    """Scales and zero points for all groups; under desc_act the groups follow the order of the columns."""
    scattered = method.order == "desc_act" and fmt.group_size != -1
    if scattered:
        weight, hessians = weight[:, order[0]], hessians[:, order[0]][:, :, order[0]]
    grid = search_grid(weight, fmt, hessians) if method.searches_grid else fmt.quantize(weight)
    if not scattered:
        return grid
    group_of = torch.empty_like(order[0], dtype=torch.int32)
    group_of[order[0]] = contiguous_groups(len(group_of), grid.group_size, order.device)
    return replace(grid, group_of=group_of)


def _round_columns(weight: Tensor, grid: IntegerWeight, order: Tensor, factors: Tensor) -> Tensor:
    """Codes [layers * out, in] of stacked weights; order [layers, in]."""
    by_layer = [each.float().unflatten(0, (len(order), -1)) for each in (weight, grid.scales, grid.zeros)]
    columns, scales, zeros = (each.mT.contiguous() for each in by_layer)  # [layers, in or groups, out]
    top = (1 << grid.bits) - 1
    codes = round_in_order(take_rows(columns, order), scales, zeros, grid.input_groups()[order], top, order, factors)
    return codes.flatten(0, 1)
