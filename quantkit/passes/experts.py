"""The experts of a block, as many together as fit: their statistics are gone before the next ones are looked at.

An expert is rounded by the tokens that its router sends it, and a little by inputs of its whole block, which count the
less the more tokens it has of its own (`InputStatistics.lean_on`). So one that few tokens reached, or none, is rounded
by what else its block reads; where that is too few to go by, it is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantkit.blocks import BlockPart, weight_of
from quantkit.formats import Format
from quantkit.methods import Method
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.statistics import SAMPLE, InputStatistics
from quantkit.passes.activations import Activations
from quantkit.passes.group import BlockQuantizer, OfExpert
from quantkit.stages import Stage
from quantkit.working_memory import how_many_together

ENOUGH = 0.25  # tokens for each input of an expert; below that most of what it may read was never seen
POOLED = 8192  # tokens that stand for a whole block
HESSIANS, WEIGHTS = 4, 8  # copies at once: sums, stacked, factors twice; and what the search of a grid compares


def expert_bytes(outputs: int, inputs: int) -> int:
    """Of one expert while it is rounded, in float32: its H and factors, its weights, and a sample of what it reads."""
    return 4 * inputs * (HESSIANS * inputs + WEIGHTS * outputs + SAMPLE)


def _has_input_scale(fmt: Format) -> bool:
    rounding = fmt.input_rounding
    return rounding is not None and rounding.calibrated


class ExpertRounding:
    """What calibration knows of the experts of one part. `inputs` is empty storage for what they read."""

    def __init__(self, part: BlockPart, hidden: Iterable[Tensor], inputs: Activations, method: Method) -> None:
        self._part, self._method, self._inputs = part, method, inputs
        experts = part.routed_stages[0].experts
        assert experts is not None
        self._tokens: list[tuple[Tensor, ...]] = []  # of every batch, of every expert: the tokens that it was sent
        self._lengths: list[int] = []  # of every batch: tokens
        self._width = 0
        self._device = weight_of(part.block.get_submodule(part.routed_stages[0].names[0].format(0))).device
        self._pool: InputStatistics | None = None  # of what experts read; the same for all
        for batch in hidden:
            routed = part.route(batch)
            inputs.append(routed.inputs)
            length, self._width = routed.inputs.shape
            self._lengths.append(length)
            chosen = routed.chosen.flatten()
            counts = chosen.bincount(minlength=experts.count).tolist()
            tokens = chosen.argsort(stable=True) // routed.chosen.shape[1]
            self._tokens.append(tokens.split(counts))
        self._most = how_many_together(self._device, 16 * self._width)  # rows, gathered, stacked and in float32

    @torch.no_grad()
    def run(self, work: BlockQuantizer) -> None:
        """Quantizes the linears of every expert in place."""
        stages = [stage for stage in self._part.routed_stages if work.wants(stage)]
        if not stages:
            return
        scaling = self._scale(work)
        by_expert = [stage.by_expert for stage in stages]
        for numbers in self._together(stages):
            for each in by_expert:
                work.quantize_together(
                    self._part.block, [self._read_by(work, each[number], number, scaling) for number in numbers]
                )

    def _together(self, stages: list[Stage]) -> Iterator[range]:
        """Numbers of experts that are rounded at once."""
        largest = max(expert_bytes(*self._stacked(stage)) for stage in stages)
        count, at_once = len(self._tokens[0]), how_many_together(self._device, largest)
        return (range(start, min(start + at_once, count)) for start in range(0, count, at_once))

    def _stacked(self, stage: Stage) -> tuple[int, int]:
        """Outputs and inputs of an expert's linears that share an input."""
        weights = [weight_of(self._part.block.get_submodule(name.format(0))) for name in stage.names]
        return sum(len(weight) for weight in weights), weights[0].shape[1]

    def _read_by(self, work: BlockQuantizer, stage: Stage, number: int, scaling: Mapping[str, Any]) -> OfExpert:
        statistics, notes = self._statistics(stage, number)
        if not self._reads_inputs(stage):
            return stage, statistics, notes
        if _has_input_scale(work.formats[stage.names[0]]):
            statistics.cover(self._largest)  # engines run all experts of a layer with one scale
        return stage, statistics, {**notes, **scaling}

    def _scale(self, work: BlockQuantizer) -> dict[str, Any]:
        """Scales what all experts read, where the method does; what the log should say of it."""
        if not self._method.scales_inputs:
            return {}
        device = self._device
        pooled = InputStatistics(self._width, device, hessian=self._method.wants_hessian)
        with fast_products(device):
            for batch in self._inputs:
                pooled.add(batch)
        scales, notes = work.scale_norm(self._part.block, self._part.part.norm, pooled)
        if scales is not None:
            for index, batch in enumerate(self._inputs):
                self._inputs[index] = batch / scales.to(batch.dtype)
        return notes

    def _statistics(self, stage: Stage, number: int) -> tuple[InputStatistics, dict[str, Any]]:
        """Of what an expert's linears read, and what the log should say of it."""
        count = sum(len(tokens[number]) for tokens in self._tokens)
        starved = count < ENOUGH * self._width
        found = self._of(stage, self._rows(tokens[number] for tokens in self._tokens))
        notes: dict[str, Any] = {"expert_tokens": count}
        if starved or self._method.wants_hessian:
            pool = self._pooled(stage)
            if self._method.wants_hessian:
                found.lean_on(pool)
            if starved:
                found.see(pool)
                notes["pooled_tokens"] = pool.tokens
        return found, notes

    def _reads_inputs(self, stage: Stage) -> bool:
        """Whether its linears read what the experts are called with."""
        return stage.role == self._part.routed_stages[0].role

    @cached_property
    def _largest(self) -> Tensor:
        """The largest magnitude of every column that any expert is called with."""
        return torch.stack([batch.abs().amax(0).float() for batch in self._inputs]).amax(0)

    def _pooled(self, stage: Stage) -> InputStatistics:
        """Of tokens of the whole block."""
        reads_inputs = self._reads_inputs(stage)
        if reads_inputs and self._pool is not None:
            return self._pool
        found = self._of(stage, [self._pool_inputs])
        if reads_inputs:
            self._pool = found
        return found

    @cached_property
    def _pool_inputs(self) -> Tensor:
        every = -(-sum(self._lengths) // POOLED)
        return torch.cat([batch[::every] for batch in self._inputs])

    def _of(self, stage: Stage, inputs: Iterable[Tensor]) -> InputStatistics:
        """Of what the linears of an expert's stage read, from what the expert is called with."""
        width = weight_of(self._part.block.get_submodule(stage.names[0])).shape[1]
        found = InputStatistics(width, self._device, hessian=self._method.wants_hessian)
        with fast_products(self._device):
            for rows in inputs:
                found.add(self._part.expert_reads(stage, rows))
        return found

    def _rows(self, numbers: Iterable[Tensor]) -> Iterator[Tensor]:
        """Some rows of every batch, those of many batches at once: products of few rows are slow."""
        rows, count = list[Tensor](), 0
        for index, own in enumerate(numbers):
            if len(own):
                rows.append(self._inputs[index][own])
                count += len(own)
            if count >= self._most:
                yield torch.cat(rows)
                rows, count = [], 0
        if rows:
            yield torch.cat(rows)
