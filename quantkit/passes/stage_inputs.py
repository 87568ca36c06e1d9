"""Statistics of what the linears of a stage read; where the stage has experts, of every expert's own tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from quantkit.blocks import BlockPart, weight_of
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.statistics import InputStatistics
from quantkit.stages import Stage


def stage_statistics(
    part: BlockPart, stage: Stage, batches: Iterable[Sequence[Tensor | None]], *, hessian: bool = True
) -> list[InputStatistics]:
    """One for every expert, or a single one. `batches` are as `BlockPart.inputs` gives them."""
    weights = [weight_of(part.block.get_submodule(each.names[0])) for each in stage.by_expert]
    statistics = [InputStatistics(weight.shape[1], weight.device, hessian=hessian) for weight in weights]
    with fast_products(weights[0].device):
        for batch in batches:
            for each, inputs in zip(statistics, batch, strict=True):
                if inputs is not None:
                    each.add(inputs)
    return statistics
