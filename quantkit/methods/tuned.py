"""Learned rounding: which way every weight is rounded, and each group's range, by the error of a whole block's outputs.

GPTQ and AWQ make the outputs of each layer right by itself. Here all linears of a block move together, by gradients
through the block, in steps of one size against the gradient's sign (SignRound; Cheng et al., 2023, arXiv 2309.05516).
It begins with the best that AWQ and GPTQ make of the block, and ends with the best step: never worse than its start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Format, IntegerFormat, IntegerWeight
from quantkit.methods.best import CANDIDATES, BestMethod, candidate
from quantkit.methods.block_tuning import JUDGEMENTS, BlockTuner, Schedule
from quantkit.methods.costing import GroupWork, Speed
from quantkit.methods.gptq import GptqMethod
from quantkit.methods.grid import search_grid
from quantkit.methods.held_back import JUDGED
from quantkit.methods.learned_grid import LearnedGrid
from quantkit.methods.method import (
    Batches,
    Method,
    Rounded,
    ScaleChoice,
    Tie,
    TunedBlock,
    require_integer,
    require_one_of,
)
from quantkit.methods.statistics import InputStatistics

BACKWARD = 2  # forward passes that take as long as a backward pass
CODES = 3  # sets of them: two starts and the best, a byte each
FEW_STEPS = 50  # with fewer, steps are not made larger: they would only undo what the start has


@dataclass(frozen=True)
class TunedMethod(Method):
    """`steps` for each block, each on `batch` sequences; `lr` of the first step, by default 1 / steps, at most 0.02.

    `optimizer`: steps of one size (`sign`), or `adam`. `seed` orders the sequences. `start`: what the block is before
    the first step, made by `awq+gptq`, `awq` or `gptq`, or by the `best` of these; `target` is GPTQ's.
    """

    name: ClassVar[str] = "tuned"
    steps: int = 200
    batch: int = 8
    lr: float | None = None
    optimizer: str = "sign"
    start: str = "best"
    target: str = GptqMethod.target
    seed: int = 0

    def __post_init__(self) -> None:
        for option, least, most in (("steps", 1, 100_000), ("batch", 1, 1024), ("seed", 0, 2**63 - 1)):
            if not least <= getattr(self, option) <= most:
                raise InputError(f"{option} is {getattr(self, option)}, but must be {least} to {most}")
        if self.lr is not None and not 0 < self.lr <= 1:
            raise InputError(f"lr is {self.lr}, but must be above 0 and at most 1")
        require_one_of("optimizer", self.optimizer, ("sign", "adam"))
        require_one_of("start", self.start, ("best", *CANDIDATES))
        _ = self._start  # checks the target

    @property
    def _start(self) -> Method:
        return BestMethod(target=self.target) if self.start == "best" else candidate(self.start, target=self.target)

    @property
    def wants_hessian(self) -> bool:
        return True

    @property
    def wants_drift(self) -> bool:
        return self._start.wants_drift

    @property
    def scales_inputs(self) -> bool:
        return self._start.scales_inputs

    @property
    def searches_grid(self) -> bool:
        return True

    @property
    def tunes_blocks(self) -> bool:
        return True

    @property
    def candidates(self) -> Mapping[str, Method]:
        return {name: replace(self, start=name) for name in self._start.candidates}

    def check(self, fmt: Format) -> None:
        if require_integer(self.name, fmt).input_rounding is not None:
            raise InputError(f"method 'tuned' learns weights for inputs in 16 bits, but '{fmt.name}' rounds them too")

    def choose_scales(self, weight: Tensor, fmt: Format, inputs: InputStatistics, tie: Tie) -> ScaleChoice:
        return self._start.choose_scales(weight, fmt, inputs, tie)

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        return self._start.round(weight, fmt, inputs)

    def round_together(
        self, weights: Sequence[Tensor], fmt: Format, inputs: Sequence[InputStatistics]
    ) -> list[Rounded]:
        return self._start.round_together(weights, fmt, inputs)

    def tune_block(self, block: TunedBlock, inputs: Batches, targets: Batches) -> Mapping[str, Rounded]:
        tuner = BlockTuner(block, inputs, targets)
        starts = {"calibrated": _integers(block), "nearest": _searched(block)}
        losses = {kind: tuner.loss(start) for kind, start in starts.items()}
        kind = min(losses, key=lambda each: losses[each])
        grids = {
            name: LearnedGrid(block.weight(name), weight, require_integer(self.name, block.formats[name]))
            for name, weight in starts[kind].items()
        }
        rate = self.lr or 1 / max(self.steps, FEW_STEPS)
        found = tuner.tune(grids, starts[kind], Schedule(self.steps, self.batch, rate, self.optimizer, self.seed))
        notes: dict[str, float | str] = {"block_loss": found.loss, "block_start_loss": found.start_loss}
        notes |= {f"block_{kind}_loss": loss for kind, loss in losses.items()} | {"start": kind, "step": found.step}
        return {name: Rounded(weight, notes=notes) for name, weight in found.weights.items()}

    def tuned_sequences(self, samples: int) -> int:
        steps = self.steps * min(self.batch, samples) * (1 + BACKWARD)
        return steps + JUDGEMENTS * min(JUDGED, samples) + 4 * samples

    def tuning_bytes(self, weights: int) -> int:
        """In float32: what is rounded, offsets and their gradients, those of the weights twice, and the block's own."""
        return (4 * 6 + CODES) * weights

    def cost_seconds(self, group: GroupWork, tokens: int, speed: Speed) -> float:
        starts = self._start.candidates.values() or [self._start]  # the best of them is not fitted again
        learning = 3 * self.steps * group.weights * speed.rounding_seconds  # decoded, its gradient, moved
        return sum(start.cost_seconds(group, tokens, speed) for start in starts) + learning

    def warnings(self, formats: Collection[Format], widest: int, samples: int, seq_len: int) -> Iterator[str]:
        return self._start.warnings(formats, widest, samples, seq_len)


def _integers(block: TunedBlock) -> dict[str, IntegerWeight]:
    """What the block's linears were rounded to."""
    start = {}
    for name, weight in block.start.items():
        assert isinstance(weight, IntegerWeight)  # `check` lets nothing else through
        start[name] = weight
    return start


def _searched(block: TunedBlock) -> dict[str, IntegerWeight]:
    """Each weight at its nearest code, on the ranges that suit the weights themselves best."""
    found = {}
    for name, fmt in block.formats.items():
        assert isinstance(fmt, IntegerFormat)
        weight = block.weight(name)
        found[name] = search_grid(weight, fmt, torch.eye(weight.shape[1], device=weight.device))
    return found
