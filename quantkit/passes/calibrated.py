"""Calibrated methods, block by block: each stage of a block sees what the quantized layers before it produce."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit import working_memory
from quantkit.arch import Config, Family
from quantkit.blocks import BlockPart, BlockRunner, run_block
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import Format
from quantkit.methods import Method
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.held_back import fitted
from quantkit.methods.method import TunedBlock
from quantkit.methods.statistics import InputStatistics
from quantkit.passes.activations import Activations, Place, choose_place
from quantkit.passes.experts import ExpertRounding
from quantkit.passes.group import BlockQuantizer
from quantkit.passes.result import QuantizedBlock, QuantizedLayer
from quantkit.passes.stage_inputs import stage_statistics
from quantkit.passes.twin import Twin, TwinPart
from quantkit.served import reads_as_served, rounds_tokens
from quantkit.stages import Stage

KEPT_INNER_BYTES = 512 << 20  # inputs of a part's last linear are kept up to this size, else computed twice
ORIGINAL = "original-"  # before the names of saved states: those of the model that is not quantized


def _unheard(_: QuantizedLayer) -> None:
    """Of a layer that may be made anew."""


def check_folds(method: Method, family: Family, config: Config) -> None:
    """Refuses a method that scales inputs where no layer of the model could take the scales."""
    layers = range(int(config["num_hidden_layers"]))
    if method.scales_inputs and not any(stage.fold for layer in layers for stage in family.stages(layer, config)):
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
        method: Method,
        device: str,
        scratch: Path,
    ) -> None:
        check_folds(method, family, source.config)
        self.source, self.family, self.chosen, self.method = source, family, chosen, method
        self.runner = BlockRunner(source, family, device)
        self._scratch = scratch  # for activations that do not fit into memory
        self._place: Place = "host"
        self.hidden = Activations(self.runner.device, self._place, scratch)
        self._original = Activations(self.runner.device, self._place, scratch)  # the same where nothing is quantized
        self._arguments: list[dict[str, Any]] = []
        self._num_learned: int | None = None  # of the first batches, the others are held back; None: none is
        self._num_fitted: int | None = None  # of the first batches, that statistics are taken of now; None: of all

    def begin(self, tokens: Tensor) -> None:
        """Calibration tokens [samples, length] become the hidden states before the first block."""
        for part in self._prepare(tokens):
            self.hidden.append(self.runner.embed(part))
        if self._follows_original:
            self._original.extend(self.hidden)

    def resume(self, tokens: Tensor, states: Iterator[tuple[str, Tensor]]) -> None:
        """Goes on from the hidden states that `states()` gave earlier, by name."""
        self._prepare(tokens)
        for name, batch in states:
            (self._original if name.startswith(ORIGINAL) else self.hidden).append(batch)

    def states(self) -> dict[str, Tensor]:
        """The hidden states before the next block, to be saved."""
        both = {"": self.hidden, ORIGINAL: self._original}
        return {
            f"{name}batch-{index:05d}": batch.cpu() for name, own in both.items() for index, batch in enumerate(own)
        }

    def blocks(self, on_layer: Callable[[QuantizedLayer], None], *, first: int = 0) -> Iterator[QuantizedBlock]:
        """Quantizes block after block from `first` on."""
        for layer in range(first, len(self.runner)):
            parts = self.runner.load(layer, self._arguments[layer])
            inputs = self._kept("inputs", self.hidden) if self._compares else None
            twin = self._twin(parts) if self.method.wants_drift else None
            if inputs is not None:
                self._follow_original(parts)
            if inputs is not None and self.method.candidates:
                work = self._best(parts, layer, on_layer, inputs, twin)
            else:
                work = self._quantize(parts, self.method, layer, on_layer, twin)
            if inputs is not None and self.method.tunes_blocks:
                self._tune(parts, work, inputs)
            block = work.result(parts[0].block)
            self.runner.free(layer)
            yield block

    @property
    def _compares(self) -> bool:
        """Whether a block's outputs are held against those of the model that is not quantized."""
        return self.method.tunes_blocks or bool(self.method.candidates)

    @property
    def _follows_original(self) -> bool:
        """Whether the model that is not quantized runs beside the one that is."""
        return self._compares or self.method.wants_drift

    def _quantize(
        self,
        parts: tuple[BlockPart, ...],
        method: Method,
        layer: int,
        on_layer: Callable[[QuantizedLayer], None],
        twin: Twin | None,
    ) -> BlockQuantizer:
        """Quantizes a block in place; the hidden states before it become those after it."""
        work = BlockQuantizer(self.source, self.family, self.chosen, method, layer, on_layer)
        exact = twin.begin() if twin is not None and method.wants_drift else [None] * len(parts)
        for part, each in zip(parts, exact, strict=True):
            self._run_part(part, work, each)
        return work

    def _kept(self, name: str, hidden: Activations) -> Activations:
        """What a block reads, where the hidden states will be those after it."""
        inputs = self._activations(name)
        inputs.extend(hidden)
        return inputs

    def _twin(self, parts: tuple[BlockPart, ...]) -> Twin:
        if not self._compares:
            return Twin(parts, self._original)
        return Twin(parts, self._kept("exact", self._original), self._kept("exact-inputs", self._original))

    @torch.no_grad()
    def _follow_original(self, parts: tuple[BlockPart, ...]) -> None:
        """Makes the targets what a block makes in the model that is not quantized."""
        with fast_products(self.runner.device):
            for index, batch in enumerate(self._original):
                self._original[index] = run_block(parts, batch)

    def _best(
        self,
        parts: tuple[BlockPart, ...],
        layer: int,
        on_layer: Callable[[QuantizedLayer], None],
        inputs: Activations,
        twin: Twin | None,
    ) -> BlockQuantizer:
        """Quantizes a block by the candidate that errs least on the sequences held back; its log says so.

        Each is tried on the others alone, and on the block as its files have it, with norms and all. The best is fitted
        to all sequences afterwards; not where learning goes on from it, which is judged on those held back, too.
        """
        candidates, block = self.method.candidates, parts[0].block
        learns, errors, best = self.method.tunes_blocks, dict[str, float](), None
        self._num_fitted = self._num_learned
        for name, method in candidates.items():
            work = self._quantize(parts, method, layer, on_layer if learns else _unheard, twin)
            errors[name] = self._error()
            chosen = min(errors, key=lambda each: errors[each])
            if learns and chosen == name:
                best = work
                best.keep(block)
            self.runner.free(layer)
            self.runner.load(layer, self._arguments[layer])
            for index, batch in enumerate(inputs):
                self.hidden[index] = batch
        self._num_fitted = None
        if best is None:
            best = self._quantize(parts, candidates[chosen], layer, on_layer, twin)
        else:
            best.restore(block)
        best.note({"chosen": chosen, "block_errors": errors})
        return best

    @torch.no_grad()
    def _error(self) -> float:
        """Of a block's outputs on the sequences held back: the square of what they are off, relative to their own."""
        error = energy = 0.0
        for index in range(self._num_learned or 0, len(self.hidden)):
            target = self._original[index].float()
            error += float((self.hidden[index].float() - target).square().sum())
            energy += float(target.square().sum())
        if not math.isfinite(error):
            raise InputError("the loss is not finite; the model's weights or activations overflow")
        return error / max(energy, 1e-30)

    def _tune(self, parts: tuple[BlockPart, ...], work: BlockQuantizer, inputs: Activations) -> None:
        """Lets a method that learns through a block change what its linears were rounded to."""
        forward = partial(run_block, parts)
        with work.unrounded(parts[0].block) as (weights, start), torch.enable_grad():
            block = TunedBlock(parts[0].block, weights, work.formats, start, forward)
            tuned = work.method.tune_block(block, inputs, self._original)
        work.take(parts[0].block, tuned)
        with torch.no_grad(), fast_products(self.runner.device):
            for index, batch in enumerate(inputs):
                self.hidden[index] = forward(batch)

    @torch.no_grad()
    def _run_part(self, part: BlockPart, work: BlockQuantizer, twin: TwinPart | None) -> None:
        """One stage after the other, then the hidden states after the part, and those of its twin that stays exact."""
        if any(work.wants(stage) for stage in part.routed_stages):
            self._experts(part, work.method).run(work)
        inner = None
        with ExitStack() as served:
            for stage in part.stages:
                if stage == part.closing:
                    with fast_products(self.runner.device):
                        inner = self._keep_inner(part, stage, self.hidden)
                        if twin is not None:
                            twin.inner = self._keep_inner(twin.part, stage, twin.hidden)
                if work.wants(stage) and not stage.routed:
                    divisor = work.quantize(part.block, stage, self._statistics(part, stage, inner, twin, work))
                    if inner is not None and divisor is not None:
                        for index, batch in enumerate(inner):
                            inner[index] = batch / divisor.to(batch.dtype)
                    served.enter_context(reads_as_served(part.block, stage.names, work.formats))
            with fast_products(self.runner.device):
                for index, batch in enumerate(self.hidden):
                    self.hidden[index] = part.run(batch) if inner is None else part.close(batch, inner[index])
        if twin is not None:
            with fast_products(self.runner.device):
                twin.run()

    def _experts(self, part: BlockPart, method: Method) -> ExpertRounding:
        with fast_products(self.runner.device):
            inputs = self._activations("experts")
            return ExpertRounding(part, islice(self.hidden, self._num_fitted), inputs, method)

    def _keep_inner(self, part: BlockPart, closing: Stage, hidden: Activations) -> Activations | None:
        """What the closing stage reads, for all batches, unless that is too much to keep."""
        inner = Activations(self.runner.device, "device", self._scratch)
        for batch in hidden:
            (inputs,) = part.inputs(closing, batch)
            assert inputs is not None
            if inputs.nbytes * len(hidden) > KEPT_INNER_BYTES:
                return None
            inner.append(inputs)
        return inner

    def _statistics(
        self, part: BlockPart, stage: Stage, inner: Activations | None, twin: TwinPart | None, work: BlockQuantizer
    ) -> InputStatistics:
        """Of what the stage reads, rounded where its format rounds each token to float8."""
        batches: Iterable[list[Tensor | None]] = (part.inputs(stage, batch) for batch in self.hidden)
        if inner is not None:
            batches = ([batch] for batch in inner)
        exact = None if twin is None else twin.inputs(stage)
        fmt = work.formats[stage.names[0]]
        if rounds_tokens(fmt):
            batches = ([fmt.served_inputs(inputs) for inputs in batch if inputs is not None] for batch in batches)
        seen = islice(batches, self._num_fitted)
        (found,) = stage_statistics(part, stage, seen, hessian=work.method.wants_hessian, exact=exact)
        return found

    def _prepare(self, tokens: Tensor) -> list[Tensor]:
        """Sequences that run through a block at once; where candidates are compared, those held back by themselves."""
        self._arguments = self.runner.arguments(tokens.shape[1])
        size = tokens.numel() * int(self.source.config["hidden_size"]) * self.runner.dtype.itemsize
        self._place = choose_place(size, self.runner.device)
        self.hidden, self._original = self._activations("activations"), self._activations("original")
        most = self.runner.batch_tokens
        if self.method.tunes_blocks:  # learning keeps what is in between, too
            most = max(working_memory.BATCH_TOKENS, most // 2)
        at_once = max(1, most // tokens.shape[1])
        learned = fitted(len(tokens)) if self.method.candidates else len(tokens)
        batches = [*tokens[:learned].split(at_once)]
        if learned < len(tokens):
            self._num_learned = len(batches)
            batches += tokens[learned:].split(at_once)
        return batches

    def _activations(self, name: str) -> Activations:
        return Activations(self.runner.device, self._place, self._scratch, name)
