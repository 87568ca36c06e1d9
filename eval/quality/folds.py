"""Scales that a method moved from one linear into the one before it, seen from the outside.

AWQ and SmoothQuant divide the outputs of v_proj and up_proj by scales and multiply the input columns of o_proj and
down_proj by them (`arch.Fold`). Nothing is lost by that, so it must not be counted as an error. A checkpoint does not
say what was folded; it shows in both linears, and only where both tell the same is it taken for a fold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.arch import Config, Family
from quantkit.blocks import weight_of
from quantkit.stages import Stage

SAME_STORY = 0.8  # correlation of the two estimates; of independent rounding errors it is near 0, of folds near 1


@dataclass(frozen=True, eq=False)
class FoldedScales:
    """Of one fold: what the producer's last outputs were divided by, and the consumer's columns multiplied with."""

    producer: str
    consumer: str
    outputs: Tensor  # [folded]
    columns: Tensor  # [inputs of the consumer]; longer than `outputs` where heads share values

    def unfolded(self, output: Tensor) -> Tensor:
        """The producer's output [..., out] without the fold."""
        plain = output.clone()
        plain[..., -len(self.outputs) :] *= self.outputs
        return plain


def folded_scales(
    stage: Stage, family: Family, config: Config, blocks: tuple[nn.Module, nn.Module], outputs: tuple[Tensor, Tensor]
) -> FoldedScales:
    """The scales of a stage of one linear, all 1 where nothing was folded. Blocks and outputs [tokens, out] of the
    producer: original first, then quantized."""
    fold, consumer = stage.fold, stage.names[0]
    assert fold is not None
    columns_read = weight_of(blocks[0].get_submodule(consumer)).shape[1]
    folded = family.folded_outputs(fold, columns_read, config)
    head = family.size_of_head(config) if fold.kind == "value" else folded
    ours, theirs = (output[..., -folded:].reshape(-1, folded).double() for output in outputs)
    of_outputs = _fitted(theirs, ours)  # theirs * this = ours
    original, quantized = (weight_of(block.get_submodule(consumer)).double() for block in blocks)
    of_columns = _fitted(original, quantized)  # original * this = quantized
    repeats = len(of_columns) // folded
    of_columns = of_columns.view(folded // head, repeats, head).log().mean(1).exp().view(-1)
    scales = _agreed(of_outputs, of_columns).to(outputs[1].dtype)
    columns = scales.view(folded // head, 1, head).expand(-1, repeats, -1).reshape(-1)
    return FoldedScales(fold.producer, consumer, scales, columns)


def _fitted(values: Tensor, wanted: Tensor) -> Tensor:
    """The factor of every column that brings `values` nearest to `wanted`, both [rows, columns]; at least tiny."""
    return ((values * wanted).sum(0) / values.square().sum(0).clamp(min=1e-30)).clamp(min=1e-6)


def _agreed(first: Tensor, second: Tensor) -> Tensor:
    """The geometric mean of two estimates where they tell the same story, else ones."""
    logs = torch.stack([first, second]).log()
    deviations = logs - logs.mean(1, keepdim=True)
    spread = deviations.square().sum(1).prod().sqrt()
    if not bool(deviations.prod(0).sum() > SAME_STORY * spread) or not bool(spread > 0):
        return torch.ones_like(first)
    return logs.mean(0).exp()
