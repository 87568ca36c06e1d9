"""What the GPTQ kernel means, in plain torch: the standard that tests compare with, and what runs without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def round_columns(block: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """See `gptq_columns.py`."""
    block = block.clone()
    codes, errors = torch.empty_like(block, dtype=torch.uint8), torch.empty_like(block)
    pivots = factor.diagonal(dim1=1, dim2=2).unsqueeze(-1)  # [layers, columns, 1]
    # Views of all columns at once: of a small layer, slicing would take longer than the arithmetic.
    columns = zip(*(each.unbind(1) for each in (block, scale, zero, pivots, codes, errors)), strict=True)
    for i, (column, step, origin, pivot, code_of, error) in enumerate(columns):
        code = torch.round(column / step).add_(origin).clamp_(0, top)
        code_of.copy_(code)
        torch.sub(column, code.sub_(origin).mul_(step), out=error).div_(pivot)
        block[:, i + 1 :].addcmul_(factor[:, i, i + 1 :, None], error.unsqueeze(1), value=-1)
    return codes, errors
