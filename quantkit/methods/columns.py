"""Columns of weights, rounded one after the other on a given grid; those not yet rounded make up for each error."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.kernels.reference import gptq as reference

BLOCK = 128  # columns whose updates are applied to the rest in one matrix product


def take_rows(matrices: Tensor, which: Tensor) -> Tensor:
    """Of every matrix [layers, rows, out] the rows that stand in its line of `which` [layers, ...]."""
    return matrices[torch.arange(len(which), device=which.device)[:, None], which]


def round_in_order(
    columns: Tensor, scales: Tensor, zeros: Tensor, group: Tensor, top: int, order: Tensor, factors: Tensor
) -> Tensor:
    """Codes [layers, out, in] of columns [layers, in, out] in this order [layers, in], which are overwritten.

    With scales and zeros [layers, groups, out], and the group of every column in that order.
    """
    codes = torch.empty_like(columns, dtype=torch.uint8)
    round_block = _kernel(columns.device)
    inputs = columns.shape[1]
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        rows, factor = group[:, start:end], factors[:, start:end]
        codes[:, start:end], errors = round_block(
            columns[:, start:end], take_rows(scales, rows), take_rows(zeros, rows), factor[:, :, start:end], top
        )
        columns[:, end:].baddbmm_(factor[:, :, end:].mT, errors, alpha=-1)
    result = torch.empty_like(codes).scatter_(1, order[:, :, None].expand_as(codes), codes)
    return result.mT.contiguous()


def _kernel(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """What rounds one block of columns: a kernel on a GPU, plain torch elsewhere."""
    if device.type == "cuda":
        from quantkit.kernels.gptq_columns import round_columns

        return round_columns
    return reference.round_columns
