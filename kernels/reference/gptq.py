"""What the GPTQ kernel means, in plain torch: the standard that tests compare with, and what runs without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def round_columns(block: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """See `gptq_columns.py`."""
    block = block.clone()
    pivots = factor.diagonal().tolist()
    codes, errors = torch.empty_like(block, dtype=torch.uint8), torch.empty_like(block)
    for i in range(len(block)):
        code = torch.round(block[i] / scale[i]).add_(zero[i]).clamp_(0, top)
        codes[i] = code
        errors[i] = (block[i] - code.sub_(zero[i]).mul_(scale[i])).div_(pivots[i])
        block[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return codes, errors
