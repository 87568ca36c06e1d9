"""Scales of a quantized linear and weights of a norm, as numbers that can be learned: offsets that begin at 0."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from quantkit.formats import IntegerWeight
from quantkit.methods.learned_grid import straight_through

LIMIT = 0.5  # of an offset: no scale loses its sign or becomes 0


class LearnedScales(nn.Module):
    """In the place of a linear: its codes and zero points, and scales that are larger by a learned share."""

    def __init__(self, weight: IntegerWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._weight, self._bias, self._dtype = weight, bias, dtype
        self._in_order = weight.group_of is None and weight.shape[1] % weight.group_size == 0
        self.offsets = nn.Parameter(torch.zeros_like(weight.scales, dtype=torch.float32))  # [out, groups]

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self._decoded(), self._bias)

    def result(self) -> IntegerWeight:
        """With the scales as they will be stored."""
        return replace(self._weight, scales=self._scales().detach().to(self._weight.scales.dtype))

    def _scales(self) -> Tensor:
        """As they will be stored, in float32."""
        scales = self._weight.scales.float() * (1 + self.offsets)
        return straight_through(scales, scales.detach().to(self._weight.scales.dtype).float())

    def _decoded(self) -> Tensor:
        weight = self._weight
        codes, zeros, scales = (part.to(self._dtype) for part in (weight.codes, weight.zeros, self._scales()))
        if not self._in_order:
            group = weight.input_groups()
            return (codes - zeros[:, group]) * scales[:, group]
        groups: Tensor = codes.unflatten(1, (-1, weight.group_size))
        return ((groups - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(1)


class Shifted(nn.Module):
    """A parametrization of a norm's weight: moved by learned offsets, which are shares of its mean size."""

    def __init__(self, start: Tensor, stored: torch.dtype) -> None:
        super().__init__()
        self._unit, self._stored = float(start.float().abs().mean()), stored
        self.offsets = nn.Parameter(torch.zeros_like(start, dtype=torch.float32))

    def forward(self, weight: Tensor) -> Tensor:
        moved = weight.float() + self._unit * self.offsets
        return straight_through(moved, moved.detach().to(self._stored).float()).to(weight.dtype)
