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
        experts = part.routed_stages[0].experts
        assert experts is not None
        self._tokens: list[tuple[Tensor, ...]] = []  # of every batch, of every expert: the tokens that it was sent
        self._lengths: list[int] = []  # of every batch: tokens
        self._width = 0
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
        weight = weight_of(self._part.block.get_submodule(stage.names[0]))
        found = InputStatistics(weight.shape[1], weight.device, hessian=self._method.wants_hessian)
        starved = count < ENOUGH * self._width
        with fast_products(weight.device):
            for rows in self._rows(number, pooled=starved):
                found.add(self._part.expert_reads(stage, rows))
        notes = {"expert_tokens": count}
        return found, notes | {"pooled_tokens": found.tokens} if starved else notes

    def _rows(self, number: int, *, pooled: bool) -> Iterator[Tensor]:
        """The tokens of an expert, or tokens of its block with all of its own among them."""
        every = -(-sum(self._lengths) // POOLED)
        for index, (tokens, length) in enumerate(zip(self._tokens, self._lengths, strict=True)):
            own = tokens[number]
            if pooled:
                own = torch.cat([own, torch.arange(0, length, every, device=own.device)]).unique()
            if len(own):
                yield self._inputs[index][own]
