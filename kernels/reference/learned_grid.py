"""What the kernels of learned rounding mean, in plain torch: what tests compare with, and what runs without a GPU."""

from __future__ import annotations

from torch import Tensor


def unclamped(anchors: Tensor, offsets: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Codes [out, groups, size] before they are held between 0 and the largest."""
    return (anchors / scales.unsqueeze(-1)).add_(offsets).round_().add_(zeros.unsqueeze(-1))


def decode(anchors: Tensor, offsets: Tensor, scales: Tensor, zeros: Tensor, top: int, out: Tensor) -> None:
    """See `learned_grid.py`."""
    codes = unclamped(anchors, offsets, scales, zeros).clamp_(0, top)
    out.view(anchors.shape).copy_(codes.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1)))


def gradients(
    upstream: Tensor, anchors: Tensor, offsets: Tensor, scales: Tensor, zeros: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `learned_grid.py`."""
    upstream = upstream.float().view(anchors.shape)
    steps, origins = scales.unsqueeze(-1), zeros.unsqueeze(-1)
    codes = unclamped(anchors, offsets, scales, zeros)
    free = upstream.masked_fill((codes < 0) | (codes > top), 0.0)
    of_steps = (upstream * (codes.clamp_(0, top) - origins) - free * (anchors / steps)).sum(-1)
    of_zeros = -((upstream - free) * steps).sum(-1)
    return free * steps, of_steps, of_zeros
