"""Tokens in fixed point: every 128 inputs as whole numbers of 16 bits times a scale."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 128
LARGEST = 127 * 256


def rounded(x: Tensor) -> Tensor:
    """Tokens [tokens, inputs] as fixed point has them, float64."""
    short = -x.shape[1] % CHUNK
    chunks = torch.nn.functional.pad(x.double(), (0, short)).unflatten(1, (-1, CHUNK))
    scales = chunks.abs().amax(-1, keepdim=True) / LARGEST
    whole = torch.round(chunks / torch.where(scales == 0, 1.0, scales))
    found: Tensor = (whole * scales).flatten(1)[:, : x.shape[1]]
    return found


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Exact products of such tokens with a decoded weight [outputs, inputs], float64."""
    y: Tensor = rounded(x) @ weight.double().T
    return y if bias is None else y + bias.double()
