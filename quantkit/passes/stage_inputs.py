"""Statistics of what the linears of a stage read; where the stage has experts, of every expert's own tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from torch import Tensor

from quantkit.blocks import BlockPart, weight_of
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.statistics import InputStatistics
from quantkit.stages import Stage


def stage_statistics(
    part: BlockPart,
    stage: Stage,
    batches: Iterable[Sequence[Tensor | None]],
    *,
    hessian: bool = True,
    exact: Iterable[Tensor] | None = None,
) -> list[InputStatistics]:
    """One for every expert, or a single one. `batches` are as `BlockPart.inputs` gives them; `exact` are those of the
    model that is not quantized, for a drift, of a stage without experts."""
    weights = [weight_of(part.block.get_submodule(each.names[0])) for each in stage.by_expert]
    drift = exact is not None
    statistics = [InputStatistics(weight.shape[1], weight.device, hessian=hessian, drift=drift) for weight in weights]
    with fast_products(weights[0].device):
        for batch, place in zip(batches, repeat(None) if exact is None else exact, strict=False):
            for each, inputs in zip(statistics, batch, strict=True):
                if inputs is not None:
                    each.add(inputs, place)
    return statistics
