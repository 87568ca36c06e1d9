"""Learning the rounding of a whole block: small steps against the gradient of its output error, the best one kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.formats import IntegerWeight
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.held_back import judged, learning_order
from quantkit.methods.learned_grid import LIMIT, LearnedGrid
from quantkit.methods.method import Batches, TunedBlock

JUDGEMENTS = 10  # of a run, evenly spaced


@dataclass(frozen=True)
class Schedule:
    """How to learn: `optimizer` is `sign` (steps of one size) or `adam`; the rate falls to 0 in a straight line."""

    steps: int
    batch: int  # sequences of one step
    rate: float
    optimizer: str
    seed: int


@dataclass(frozen=True)
class Tuned:
    """The best that was found, by linear. Losses are squared errors of a block's outputs, relative to their square."""

    weights: Mapping[str, IntegerWeight]
    start_loss: float
    loss: float
    step: int  # after which it was found; 0: the start stayed the best


class Sequences:
    """Inputs and targets of a block, by sequence."""

    def __init__(self, inputs: Batches, targets: Batches) -> None:
        self._inputs, self._targets = inputs, targets
        lengths = [len(batch) for batch in inputs]
        self._places = [(index, row) for index, length in enumerate(lengths) for row in range(length)]
        self._at_once = max(lengths)  # as many as the pass runs through a block

    def __len__(self) -> int:
        return len(self._places)

    def pieces(self, numbers: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets [sequences, length, hidden], no more at once than a block can take."""
        for start in range(0, len(numbers), self._at_once):
            places = [self._places[number] for number in numbers[start : start + self._at_once]]
            yield _stacked(self._inputs, places), _stacked(self._targets, places)


class BlockTuner:
    """Learns through one block. Whatever happens, the block has its own weights again afterwards."""

    def __init__(self, block: TunedBlock, inputs: Batches, targets: Batches) -> None:
        self._block, self._sequences = block, Sequences(inputs, targets)

    def loss(self, weights: Mapping[str, IntegerWeight], numbers: Sequence[int] | None = None) -> float:
        """The error with some linears quantized, over some sequences or all."""
        with self._replaced(weights):
            for name, weight in weights.items():
                self._parameter(name).data.copy_(weight.dequantize())
            return self._loss(range(len(self._sequences)) if numbers is None else numbers)

    def tune(self, grids: Mapping[str, LearnedGrid], start: Mapping[str, IntegerWeight], schedule: Schedule) -> Tuned:
        """The best of a schedule's steps; the start where none is better, on the judged sequences and on all."""
        on = judged(len(self._sequences))
        start_loss = self.loss(start)
        if not math.isfinite(start_loss):
            raise InputError("the loss is not finite; the model's weights or activations overflow")
        best, least, found = start, self.loss(start, on), 0
        every = max(1, schedule.steps // JUDGEMENTS)
        with self._replaced(grids):
            for step in self._steps(grids, schedule):
                if step % every and step != schedule.steps:
                    continue
                self._set(grids)
                loss = self._loss(on)
                if loss < least:
                    best, least, found = {name: grid.rounded() for name, grid in grids.items()}, loss, step
        loss = self.loss(best) if found else start_loss
        return Tuned(best, start_loss, loss, found) if loss < start_loss else Tuned(start, start_loss, start_loss, 0)

    def _steps(self, grids: Mapping[str, LearnedGrid], schedule: Schedule) -> Iterator[int]:
        """Takes one step after the other; yields the number of those taken."""
        parameters = [parameter for grid in grids.values() for parameter in grid.parameters]
        adam = torch.optim.Adam(parameters, betas=(0.9, 0.95)) if schedule.optimizer == "adam" else None
        order = learning_order(len(self._sequences), schedule.seed)
        count = min(schedule.batch, len(self._sequences))
        for step in range(schedule.steps):
            self._set(grids)
            upstream = self._gradients(list(grids), [next(order) for _ in range(count)])
            gradients = [
                each for grid, one in zip(grids.values(), upstream, strict=True) for each in grid.gradients(one)
            ]
            rate = schedule.rate * (1 - step / schedule.steps)
            _move(parameters, gradients, rate, adam)
            yield step + 1

    def _gradients(self, names: list[str], numbers: Sequence[int]) -> list[Tensor]:
        """Of the squared error over some sequences, for the weight of every linear."""
        parameters = [self._parameter(name) for name in names]
        total = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
        with torch.enable_grad(), fast_products(parameters[0].device):
            for hidden, target in self._sequences.pieces(numbers):
                error, energy = _error(self._block.forward(hidden), target)
                found = torch.autograd.grad(error / energy * target.numel(), parameters, allow_unused=True)
                for sum_, gradient in zip(total, found, strict=True):
                    if gradient is not None:  # an expert that no token reached has none
                        sum_ += gradient
        return total

    @torch.no_grad()
    def _loss(self, numbers: Sequence[int]) -> float:
        errors = energies = 0.0
        with fast_products(next(self._block.module.parameters()).device):
            for hidden, target in self._sequences.pieces(numbers):
                error, energy = _error(self._block.forward(hidden), target)
                errors, energies = errors + float(error), energies + float(energy)
        return errors / max(energies, 1e-30)

    def _set(self, grids: Mapping[str, LearnedGrid]) -> None:
        for name, grid in grids.items():
            grid.decode_to(self._parameter(name).data)

    def _parameter(self, name: str) -> nn.Parameter:
        return self._block.module.get_parameter(f"{name}.weight")

    @contextmanager
    def _replaced(self, names: Mapping[str, object]) -> Iterator[None]:
        """For a while, linears whose weights may be changed and have gradients."""
        parameters = [self._parameter(name) for name in names]
        kept = [(parameter.data.clone(), parameter.requires_grad) for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.requires_grad_()
            yield
        finally:
            for parameter, (values, learned) in zip(parameters, kept, strict=True):
                parameter.data.copy_(values)
                parameter.requires_grad_(learned)


def _stacked(batches: Batches, places: list[tuple[int, int]]) -> Tensor:
    return torch.stack([batches[index][row] for index, row in places])


def _error(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Summed squares of the error and of the target."""
    target = target.float()
    return (output.float() - target).square().sum(), target.square().sum().clamp(min=1e-30)


@torch.no_grad()
def _move(parameters: list[Tensor], gradients: list[Tensor], rate: float, adam: torch.optim.Adam | None) -> None:
    """One step down, within the limits."""
    if adam is None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient.sign_(), alpha=rate)
    else:
        for group in adam.param_groups:
            group["lr"] = rate
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        adam.step()
    for parameter in parameters:
        parameter.clamp_(-LIMIT, LIMIT)
