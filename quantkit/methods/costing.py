"""What a method is asked about before a run: sizes of layers in, seconds on a measured device and bytes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantkit.formats import Format

COPIES = 4  # float32 copies of H and of the stacked weights that a method works on at once


@dataclass(frozen=True)
class GroupWork:
    """The linears of one block that share an input."""

    inputs: int
    layers: tuple[int, ...]  # outputs of each
    fmt: Format | None  # None: kept as they are

    @property
    def outputs(self) -> int:
        return sum(self.layers)

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    @property
    def hessian_flops(self) -> int:
        """Of the product of the stacked weights with H."""
        return 2 * self.outputs * self.inputs**2


@dataclass(frozen=True)
class Speed:
    """What a device does, measured."""

    device: torch.device
    product_flops: float  # a second, in the dtype that blocks run in
    float32_flops: float
    rounding_seconds: float  # for one weight: to round and decode it
    measure: Callable[[str, Callable[[], object]], float]  # seconds for one call of something; once for each name
