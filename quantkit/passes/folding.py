"""Input scales put where they cost nothing: into the module before, as `arch.Fold` says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quantkit.arch import Config, Family
from quantkit.blocks import weight_of
from quantkit.stages import Fold

STACKED = 1 << 26  # weights of experts that scales are searched for at once


def fold_shape(family: Family, config: Config, fold: Fold, columns: int) -> tuple[int, int]:
    """How many of the producer's last outputs a fold divides, and how many in a row feed the same heads."""
    return family.folded_outputs(fold, columns, config), family.size_of_head(config) if fold.kind == "value" else 1


def sampled_weights(weights: list[Tensor]) -> Tensor:
    """Weights [out, in] stacked, evenly spaced ones where all would be too many to search over."""
    most = max(1, STACKED // weights[0].numel())
    return torch.cat(weights[:: -(-len(weights) // most)]).float()


def tied_heads(folded: int, columns: int, head: int) -> Callable[[Tensor], Tensor]:
    """Makes scales [columns] equal where one of `folded` producer outputs feeds several columns.

    Query heads that read one value head stand next to each other: columns = (value heads, queries a head, head size).
    """
    repeats = columns // folded

    def tie(scales: Tensor) -> Tensor:
        if repeats == 1:
            return scales
        grouped = scales.view(folded // head, repeats, head)
        return grouped.log().mean(1, keepdim=True).exp().expand_as(grouped).reshape(-1)

    return tie


def producer_scales(scales: Tensor, folded: int, head: int) -> Tensor:
    """One scale per producer output [folded] from tied scales [columns]."""
    repeats = len(scales) // folded
    return scales.view(folded // head, repeats, head)[:, 0].reshape(-1) if repeats > 1 else scales


def column_scales(rows: Tensor, columns: int, head: int) -> Tensor:
    """The other way round: of every column [columns] that the outputs of a producer [folded] feed."""
    repeats = columns // len(rows)
    return rows.view(-1, 1, head).expand(-1, repeats, -1).reshape(-1) if repeats > 1 else rows


@torch.no_grad()
def divide_norm(norm: nn.Module, scales: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """Divides a norm's outputs. Returns the scales that this amounts to once its weight is stored in `dtype`.

    Where the offset or the dtype would leave nothing of an output (0 or Inf), it stays as it was.
    """
    parameter = norm.weight
    assert isinstance(parameter, nn.Parameter)
    effective = parameter.float() + offset
    stored = (effective / scales - offset).to(dtype).float()
    lost = (stored + offset == 0) | ~stored.isfinite()
    stored = torch.where(lost, parameter.float(), stored)
    parameter.data = stored.to(parameter.dtype)
    return torch.where(lost, 1.0, effective / (stored + offset))


@torch.no_grad()
def divide_outputs(linear: nn.Module, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Divides the last outputs of a plain linear, whose weight keeps values that `dtype` can store.

    Returns the scales that this amounts to. The bias is left to `divide_bias`, by these.
    """
    last = weight_of(linear)[-len(scales) :]
    stored = (last.float() / scales[:, None]).to(dtype).float()
    taken = row_ratios(last.float(), stored, scales)
    last.copy_(stored)
    return taken


@torch.no_grad()
def divide_bias(linear: nn.Module, scales: Tensor, dtype: torch.dtype) -> bool:
    """Divides the last entries of a linear's bias as `dtype` stores them; False where it has none."""
    bias = getattr(linear, "bias", None)
    if not isinstance(bias, Tensor):
        return False
    last = bias.data[-len(scales) :]
    last.copy_((last.float() / scales).to(dtype))
    return True


def row_ratios(before: Tensor, after: Tensor, unseen: Tensor) -> Tensor:
    """What brings the rows of `after` nearest to those of `before`, both [rows, in]; `unseen` [rows] for empty rows.

    Scales that were rounded once more do not have the ratio that was asked for; this is the one that they have.
    """
    energy = after.square().sum(1)
    ratio = (before * after).sum(1) / energy.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where((energy > 0) & (ratio > 0), ratio, unseen)
