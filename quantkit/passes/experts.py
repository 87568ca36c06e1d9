"""The experts of a block, one after the other: the statistics of one are gone before the next one is looked at.

An expert is rounded by the tokens that its router sends it. One that too few reached is rounded by inputs of its whole
block instead: they say more about what it will read than a handful of tokens, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quantkit.blocks import BlockPart, weight_of
from quantkit.methods import Method
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.statistics import InputStatistics
from quantkit.passes.activations import Activations
from quantkit.passes.group import BlockQuantizer
from quantkit.stages import Stage

ENOUGH = 0.25  # tokens for each input of an expert; below that most of what it may read was never seen
POOLED = 8192  # tokens that stand for a whole block


class ExpertRounding:
    """What calibration knows of the experts of one part. `inputs` is empty storage for what they read."""

    def __init__(self, part: BlockPart, hidden: Activations, inputs: Activations, method: Method) -> None:
        self._part, self._method, self._inputs = part, method, inputs
        self._chosen: list[Tensor] = []  # [tokens, experts of a token] for every batch
        for batch in hidden:
            routed = part.route(batch)
            inputs.append(routed.inputs)
            self._chosen.append(routed.chosen)

    @torch.no_grad()
    def run(self, work: BlockQuantizer) -> None:
        """Quantizes the linears of every expert in place."""
        stages = [stage for stage in self._part.routed_stages if work.wants(stage)]
        if not stages:
            return
        counts = self._counts(stages[0].by_expert)
        scaling = self._scale(work)
        for number, of_expert in enumerate(zip(*(stage.by_expert for stage in stages), strict=True)):
            for stage in of_expert:
                statistics, notes = self._statistics(stage, number, counts[number])
                work.quantize(self._part.block, stage, statistics, notes | (scaling if stage == of_expert[0] else {}))

    def _scale(self, work: BlockQuantizer) -> dict[str, Any]:
        """Scales what all experts read, where the method does; what the log should say of it."""
        if not self._method.scales_inputs:
            return {}
        first = self._inputs[0]
        pooled = InputStatistics(first.shape[-1], first.device, hessian=self._method.wants_hessian)
        with fast_products(first.device):
            for batch in self._inputs:
                pooled.add(batch)
        scales, notes = work.scale_norm(self._part.block, self._part.part.norm, pooled)
        if scales is not None:
            for index, batch in enumerate(self._inputs):
                self._inputs[index] = batch / scales.to(batch.dtype)
        return notes

    def _counts(self, experts: tuple[Stage, ...]) -> list[int]:
        """How many tokens each expert was sent."""
        counts = torch.zeros(len(experts), dtype=torch.long, device=self._chosen[0].device)
        for chosen in self._chosen:
            counts += chosen.flatten().bincount(minlength=len(experts))
        found: list[int] = counts.tolist()
        return found

    def _statistics(self, stage: Stage, number: int, count: int) -> tuple[InputStatistics, dict[str, Any]]:
        """Of what an expert's linears read, and what the log should say of it."""
        weight = weight_of(self._part.block.get_submodule(stage.names[0]))
        found = InputStatistics(weight.shape[1], weight.device, hessian=self._method.wants_hessian)
        starved = count < ENOUGH * self._inputs[0].shape[-1]
        with fast_products(weight.device):
            for rows in self._rows(number, pooled=starved):
                found.add(self._part.expert_reads(stage, rows))
        notes = {"expert_tokens": count}
        return found, notes | {"pooled_tokens": found.tokens} if starved else notes

    def _rows(self, number: int, *, pooled: bool) -> Iterator[Tensor]:
        """The tokens of an expert, or tokens of its block with all of its own among them."""
        every = -(-sum(len(chosen) for chosen in self._chosen) // POOLED)
        for index, chosen in enumerate(self._chosen):
            own = (chosen == number).any(-1)
            if pooled:
                own[::every] = True
            if bool(own.any()):
                yield self._inputs[index][own]
