"""Calibrated methods, block by block: each group of layers sees what the quantized layers before it produce."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.arch import Family
from quantkit.blocks import BATCH_TOKENS, BlockRunner, Half
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import Format
from quantkit.methods import MethodOptions
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.statistics import InputStatistics
from quantkit.methods.steps import needs_hessian, scales_inputs
from quantkit.passes.activations import Activations, choose_place
from quantkit.passes.group import BlockQuantizer
from quantkit.passes.result import QuantizedBlock, QuantizedLayer

KEPT_INNER_BYTES = 512 << 20  # what lies between two linears is kept up to this size, else computed twice


def check_folds(options: MethodOptions, family: Family) -> None:
    """Refuses a method that scales inputs where no layer of the family could take the scales."""
    if scales_inputs(options) and not family.folds:
        raise InputError(
            f"the family '{family.model_type}' has no layers that could take input scales; "
            "use a method that needs none, such as gptq"
        )


class CalibratedPass:
    """The pass of one method over all blocks. `states` between blocks can be saved, and taken up again."""

    def __init__(
        self,
        source: Checkpoint,
        family: Family,
        chosen: Mapping[str, Format],
        options: MethodOptions,
        device: str,
        scratch: Path,
    ) -> None:
        check_folds(options, family)
        self.source, self.family, self.chosen, self.options = source, family, chosen, options
        self.runner = BlockRunner(source, family, device)
        self._scratch = scratch  # for activations that do not fit into memory
        self.hidden = Activations(self.runner.device, "host", scratch)
        self._arguments: list[dict[str, Any]] = []

    def begin(self, tokens: Tensor) -> None:
        """Calibration tokens [samples, length] become the hidden states before the first block."""
        self._prepare(tokens)
        for part in tokens.split(self._batch(tokens.shape[1])):
            self.hidden.append(self.runner.embed(part))

    def resume(self, tokens: Tensor, states: Iterator[Tensor]) -> None:
        """Goes on from the hidden states that `states()` gave earlier."""
        self._prepare(tokens)
        self.hidden.extend(states)

    def states(self) -> dict[str, Tensor]:
        """The hidden states before the next block, to be saved."""
        return {f"batch-{index:05d}": batch.cpu() for index, batch in enumerate(self.hidden)}

    def blocks(self, on_layer: Callable[[QuantizedLayer], None], *, first: int = 0) -> Iterator[QuantizedBlock]:
        """Quantizes block after block from `first` on."""
        for layer in range(first, len(self.runner)):
            halves = self.runner.load(layer, self._arguments[layer])
            work = BlockQuantizer(self.source, self.family, self.chosen, self.options, layer, on_layer)
            for half in halves:
                self._run_half(half, work)
            block = work.result(halves[0].block)
            self.runner.free(layer)
            yield block

    @torch.no_grad()
    def _run_half(self, half: Half, work: BlockQuantizer) -> None:
        """The first linears of a half, then its last one, then the hidden states behind it."""
        if work.wants(half.first):
            work.quantize(half, half.first, self._statistics(half.inputs(batch) for batch in self.hidden))
        with fast_products(self.runner.device):
            inner = self._keep_inner(half)
        if work.wants((half.last,)):
            batches = inner if inner is not None else (half.inner(batch) for batch in self.hidden)
            divisor = work.quantize(half, (half.last,), self._statistics(batches))
            if inner is not None and divisor is not None:
                for index, batch in enumerate(inner):
                    inner[index] = batch / divisor.to(batch.dtype)
        with fast_products(self.runner.device):
            for index, batch in enumerate(self.hidden):
                self.hidden[index] = half.close(batch, inner[index] if inner is not None else half.inner(batch))

    def _keep_inner(self, half: Half) -> Activations | None:
        """What the last linear reads, for all batches, unless that is too much to keep."""
        first = half.inner(self.hidden[0])
        if first.nbytes * len(self.hidden) > KEPT_INNER_BYTES:
            return None
        inner = Activations(self.runner.device, "device", self._scratch)
        inner.append(first)
        inner.extend(half.inner(self.hidden[index]) for index in range(1, len(self.hidden)))
        return inner

    def _statistics(self, batches: Iterable[Tensor]) -> InputStatistics:
        statistics = None
        with fast_products(self.runner.device):
            for batch in batches:
                if statistics is None:
                    wanted = needs_hessian(self.options)
                    statistics = InputStatistics(batch.shape[-1], batch.device, hessian=wanted)
                statistics.add(batch)
        assert statistics is not None
        return statistics

    def _prepare(self, tokens: Tensor) -> None:
        self._arguments = self.runner.arguments(tokens.shape[1])
        size = tokens.numel() * int(self.source.config["hidden_size"]) * self.runner.dtype.itemsize
        place = choose_place(size, self.runner.device)
        self.hidden = Activations(self.runner.device, place, self._scratch)

    @staticmethod
    def _batch(length: int) -> int:
        return max(1, BATCH_TOKENS // length)
