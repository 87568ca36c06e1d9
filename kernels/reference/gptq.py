"""What the GPTQ kernel means, in plain torch: the standard that tests compare with, and what runs without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def round_columns(block: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """See `gptq_columns.py`."""
    block = block.clone()
    codes, errors = torch.empty_like(block, dtype=torch.uint8), torch.empty_like(block)
    pivots = factor.diagonal(dim1=1, dim2=2).unsqueeze(-1)  # [layers, columns, 1]
    for i in range(block.shape[1]):
        code = torch.round(block[:, i] / scale[:, i]).add_(zero[:, i]).clamp_(0, top)
        codes[:, i] = code
        errors[:, i] = (block[:, i] - code.sub_(zero[:, i]).mul_(scale[:, i])).div_(pivots[:, i])
        block[:, i + 1 :].addcmul_(factor[:, i, i + 1 :, None], errors[:, i, None], value=-1)
    return codes, errors
