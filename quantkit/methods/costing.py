"""What a method is asked about before a run: sizes of layers in, seconds on a measured device and bytes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantkit.formats import Format

COPIES = 4  # float32 copies of H and of the stacked weights that a method works on at once
EXPERT_RUNS = 2  # of experts: for what down reads, and for what comes after


@dataclass(frozen=True)
class GroupWork:
    """The linears of one block that share an input: a stage, or one of the experts of a stage."""

    inputs: int
    layers: tuple[int, ...]  # outputs of each
    fmt: Format | None  # None: kept as they are
    experts: int = 1  # all alike
    per_token: int = 1  # experts that a token goes through

    @property
    def outputs(self) -> int:
        return sum(self.layers)

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    @property
    def share(self) -> float:
        """Of all tokens, that reach one expert: about."""
        return self.per_token / self.experts

    @property
    def forward_weights(self) -> int:
        """That a token meets in the whole run."""
        return self.weights * self.per_token * (1 if self.experts == 1 else EXPERT_RUNS)

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
