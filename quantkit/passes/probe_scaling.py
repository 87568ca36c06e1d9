"""Input scales for probes: those that the linears of a stage would get, with everything before them left as it is.

Multiplying columns before rounding and dividing them afterwards is what a fold amounts to.
"""

from __future__ import annotations

from torch import Tensor

from quantkit.arch import Config, Family
from quantkit.formats import Format
from quantkit.methods import Method
from quantkit.methods.statistics import InputStatistics
from quantkit.passes.folding import fold_shape, sampled_weights, tied_heads
from quantkit.stages import Stage


def probe_scales(
    method: Method,
    family: Family,
    config: Config,
    stage: Stage,
    weights: list[Tensor],
    fmt: Format,
    inputs: list[InputStatistics],
) -> list[Tensor | None]:
    """One for every expert, or a single one: scales [in], None where none gain. `weights` [out, in] are stacked.

    Experts that read a norm share scales, chosen by what all of them read.
    """
    none: list[Tensor | None] = [None] * len(weights)
    if stage.fold is None or not method.scales_inputs:
        return none
    columns = weights[0].shape[1]
    folded, head = fold_shape(family, config, stage.fold, columns)
    tie = tied_heads(folded, columns, head)

    def chosen(weight: Tensor, seen: InputStatistics) -> Tensor | None:
        if not seen.tokens:
            return None
        choice = method.choose_scales(weight, fmt, seen, tie)
        return choice.scales if choice.loss < choice.identity_loss else None

    if stage.routed and stage.fold.kind == "norm":
        return [chosen(sampled_weights(weights), _pooled(inputs))] * len(weights)
    return [chosen(weight.float(), seen) for weight, seen in zip(weights, inputs, strict=True)]


def _pooled(inputs: list[InputStatistics]) -> InputStatistics:
    """Of what all experts read."""
    first = inputs[0]
    pooled = InputStatistics(first.absmax.numel(), first.absmax.device, hessian=first.hessian is not None)
    for each in inputs:
        if each.tokens:
            pooled.see(each)
            if pooled.hessian is not None:
                pooled.hessian += each.require_hessian()
    return pooled
