"""What caches of integers mean, in plain torch: `attention/integer_codes.py` has their layout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantkit.kernels.attention.integer_codes import CUTS, INT8, LARGEST_SCALE, SMALLEST_SCALE, IntegerCodes

_LARGEST_MIDDLE = 65504.0


def block_of(head_dim: int) -> int:
    """Neighbouring elements of half a head that are rotated together: a power of two, and as many in the other half."""
    half = head_dim // 2
    return half & -half


def rotate_heads(x: Tensor) -> Tensor:
    """Heads x [..., head_dim] times an orthogonal matrix, in float32, so that large channels spread over others.

    Where head_dim is a power of two it is Hadamard's, in Sylvester's order; else it rotates blocks of 2 * block_of().
    """
    low, high = x.float().chunk(2, -1)
    size = block_of(x.shape[-1])
    matrix = _hadamard(size, x.device) / math.sqrt(2 * size)
    halves = (half.unflatten(-1, (-1, size)) @ matrix for half in (low + high, low - high))
    return torch.cat([half.flatten(-2) for half in halves], -1)


def _hadamard(size: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def encode(x: Tensor, kind: IntegerCodes) -> tuple[Tensor, Tensor]:
    """Codes [..., row_bytes] and words [...] of heads x [..., head_dim]; keys of 4 bits have been rotated."""
    x = x.float()
    if kind is INT8:
        scale = (x.abs().amax(-1) / 127).clamp(max=LARGEST_SCALE)
        codes = x / torch.where(scale > 0, scale, 1.0)[..., None]
        return codes.round().clamp(-127, 127).to(torch.int8), scale
    codes, words = _best_halves(x.unflatten(-1, (2, -1)))
    low, high = codes.to(torch.uint8).unbind(-2)
    return low | high << 4, words.flatten(-2).view(torch.int64)[..., 0]


def _best_halves(halves: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0 to 15 of halves [..., columns], and scale and middle [..., 2], of the range with the least error."""
    lowest, highest = halves.aminmax(dim=-1)
    width = highest - lowest
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for below, above in CUTS:
        scale = (width * ((1 - below - above) / 15)).clamp(SMALLEST_SCALE, LARGEST_SCALE).half()
        middle = (lowest + width * below + 8 * scale.float()).clamp(-_LARGEST_MIDDLE, _LARGEST_MIDDLE).half()
        step, centre = scale.float()[..., None], middle.float()[..., None]
        codes = ((halves - centre) / step).round().clamp(-8, 7)
        found.append(((codes * step + centre - halves).square().sum(-1), codes + 8, torch.stack((scale, middle), -1)))
    errors, codes, words = (torch.stack(part) for part in zip(*found, strict=True))
    best = errors.argmin(0)[None, ..., None]
    return codes.take_along_dim(best, 0)[0], words.take_along_dim(best, 0)[0]


def decode(codes: Tensor, words: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Heads [..., head_dim] of these codes and words."""
    if codes.dtype == INT8.dtype:
        return codes.to(dtype) * words.to(dtype)[..., None]
    parts = words.contiguous()[..., None].view(torch.float16).to(dtype).unflatten(-1, (2, 2))  # scale and middle
    scale, middle = parts.unbind(-1)
    halves = torch.stack((codes & 15, codes >> 4), -2).to(dtype) - 8
    numbers: Tensor = halves * scale[..., None] + middle[..., None]
    return numbers.flatten(-2)
