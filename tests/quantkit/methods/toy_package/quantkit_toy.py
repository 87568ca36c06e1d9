"""A package of its own with methods for quantkit, as a user may write one; its dist-info names the entry points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Format
from quantkit.methods import Method
from quantkit.methods.costing import GroupWork, Speed
from quantkit.methods.method import Batches, Rounded, TunedBlock
from quantkit.methods.statistics import InputStatistics


@dataclass(frozen=True)
class ShrinkMethod(Method):
    """Rounds weights made smaller by `factor`, plainly and without data: easy to recognise in a checkpoint."""

    name: ClassVar[str] = "toy-shrink"
    factor: float = 0.5
    steps: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise InputError(f"factor is {self.factor}, but must be above 0 and at most 1")

    @property
    def calibrated(self) -> bool:
        return False

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        return Rounded(fmt.quantize(weight * self.factor**self.steps), notes={"toy_factor": self.factor})

    def cost_seconds(self, group: GroupWork, tokens: int, speed: Speed) -> float:
        return 1000.0 * self.steps


@dataclass(frozen=True)
class TuneMethod(Method):
    """Learns one factor of a linear through its block: far from 1 at first, it must come out as 1."""

    name: ClassVar[str] = "toy-tune"
    linear: str = "mlp.down_proj"

    @property
    def tunes_blocks(self) -> bool:
        return True

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        return Rounded(fmt.quantize(weight))

    def tune_block(self, block: TunedBlock, inputs: Batches, targets: Batches) -> Mapping[str, Rounded]:
        parameter = block.module.get_parameter(f"{self.linear}.weight")
        original, factor = parameter.data.clone(), 0.5
        parameter.data.mul_(factor)
        for hidden, target in zip(inputs, targets, strict=True):
            loss = (block.forward(hidden) - target).square().sum()
            (gradient,) = torch.autograd.grad(loss, [parameter])
            if abs(factor - 1) > 0.1:  # where the output is linear in the factor, one step leads to the least loss
                factor -= 2 * float(loss.detach()) / float((gradient * original).sum())
                parameter.data.copy_(original * factor)
        parameter.data.copy_(original)
        fmt = block.formats.get(self.linear, next(iter(block.formats.values())))
        return {self.linear: Rounded(fmt.quantize(original * factor), notes={"toy_factor": factor})}


@dataclass(frozen=True)
class Misnamed(ShrinkMethod):
    name: ClassVar[str] = "another"


@dataclass(frozen=True, kw_only=True)
class NeedyMethod(ShrinkMethod):
    """Has an option without a default."""

    name: ClassVar[str] = "toy-needy"
    strength: int


def helper() -> None:
    """Not a method."""
