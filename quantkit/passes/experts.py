"""The experts of a block, one after the other: the statistics of one are gone before the next one is looked at.

An expert is rounded by the tokens that its router sends it, and a little by inputs of its whole block, which count the
less the more tokens it has of its own (`InputStatistics.lean_on`). So one that few tokens reached, or none, is rounded
by what else its block reads; where that is too few to go by, it is said.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantkit.blocks import BlockPart, weight_of
from quantkit.formats import Format
from quantkit.methods import Method
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.statistics import InputStatistics
from quantkit.passes.activations import Activations
from quantkit.passes.group import BlockQuantizer
from quantkit.stages import Stage

ENOUGH = 0.25  # tokens for each input of an expert; below that most of what it may read was never seen
POOLED = 8192  # tokens that stand for a whole block


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

    @torch.no_grad()
    def run(self, work: BlockQuantizer) -> None:
        """Quantizes the linears of every expert in place."""
        stages = [stage for stage in self._part.routed_stages if work.wants(stage)]
        if not stages:
            return
        scaling = self._scale(work)
        for number, of_expert in enumerate(zip(*(stage.by_expert for stage in stages), strict=True)):
            for stage in of_expert:
                statistics, notes = self._statistics(stage, number)
                if self._reads_inputs(stage) and _has_input_scale(work.formats[stage.names[0]]):
                    statistics.cover(self._largest)  # engines run all experts of a layer with one scale
                work.quantize(self._part.block, stage, statistics, notes | (scaling if stage == of_expert[0] else {}))

    def _scale(self, work: BlockQuantizer) -> dict[str, Any]:
        """Scales what all experts read, where the method does; what the log should say of it."""
        if not self._method.scales_inputs:
            return {}
        device = self._tokens[0][0].device
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
        found = self._of_rows(stage, (tokens[number] for tokens in self._tokens))
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
        every = -(-sum(self._lengths) // POOLED)
        found = self._of_rows(stage, (torch.arange(0, length, every) for length in self._lengths))
        if reads_inputs:
            self._pool = found
        return found

    def _of_rows(self, stage: Stage, rows: Iterable[Tensor]) -> InputStatistics:
        """Of what the linears of an expert's stage read; rows of every batch."""
        weight = weight_of(self._part.block.get_submodule(stage.names[0]))
        found = InputStatistics(weight.shape[1], weight.device, hessian=self._method.wants_hessian)
        with fast_products(weight.device):
            for index, own in enumerate(rows):
                if len(own):
                    found.add(self._part.expert_reads(stage, self._inputs[index][own.to(weight.device)]))
        return found
