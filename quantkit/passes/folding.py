"""Input scales put where they cost nothing: into the module before, as `arch.Fold` says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


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
def divide_outputs(linear: nn.Module, scales: Tensor, dtype: torch.dtype) -> None:
    """Divides the last outputs of a plain linear; weight and bias keep values that `dtype` can store."""
    for name in ("weight", "bias"):
        parameter = getattr(linear, name, None)
        if parameter is not None:
            last = parameter.data[-len(scales) :]
            divisor = scales.view(-1, *[1] * (last.dim() - 1))
            last.copy_((last.float() / divisor).to(dtype))
