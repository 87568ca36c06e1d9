"""What a model loses when one stage of layers alone is quantized, measured for every stage in one pass.

The unquantized model runs block by block over a few sequences. At every stage a stream branches off: the hidden states
as they become when this stage alone is scaled and rounded to few bits, by the recipe's own method. All streams run on
through the blocks after it, and KL(original || stream) at the end is what the rounding of this stage costs. Only one
block is in memory at a time; the streams are kept wherever they fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from quantkit.arch import Family
from quantkit.blocks import POSITIONS, BlockPart, BlockRunner, run_block, weight_of
from quantkit.checkpoint import Checkpoint
from quantkit.divergence import token_divergence
from quantkit.errors import InputError
from quantkit.formats import IntegerFormat
from quantkit.methods import Method
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.sensitivity import Sensitivity, candidates, probe_for, rounding_errors
from quantkit.methods.statistics import InputStatistics
from quantkit.passes.activations import Activations, choose_place
from quantkit.passes.probe_scaling import probe_scales
from quantkit.passes.stage_inputs import stage_statistics
from quantkit.progress import Progress, silent
from quantkit.stages import Group, Stage
from quantkit.token_windows import StartToken, shorter_windows

# On a model of 135 M weights 4 x 128 tokens chose bits that lose 1 to 2 % more than those chosen by 4 x 256, and 4 x 32
# up to 10 %. Products in bfloat16 (`fast_products`) add up to 2e-4 nats to every KL there, less than the tokens do.
LENGTH = 128  # tokens of a sequence; longer ones are cut into pieces
SCORED = 4  # sequences that KL is measured on
FITTED_TOKENS = 4  # for each input of the widest layer: for the statistics that the method rounds by
RUINED = 100.0  # nats, for a probe that computes NaN


class SensitivityPass:
    """The pass over all blocks. Layers of one stage share a format in `chosen`."""

    def __init__(
        self,
        source: Checkpoint,
        family: Family,
        chosen: Mapping[str, IntegerFormat],
        method: Method,
        device: str,
        scratch: Path,
    ) -> None:
        self.family, self.chosen, self.method, self._config = family, chosen, method, source.config
        self.runner = BlockRunner(source, family, device)
        self.stages = [modules for modules in family.linear_groups(source.config) if modules[0] in chosen]
        self._widest = max(source.tensors[f"{modules[0]}.weight"].info.shape[1] for modules in self.stages)
        self._scratch = scratch  # for streams that do not fit into memory

    @torch.no_grad()
    def run(
        self, tokens: Tensor, target_bits: float, on_step: Progress = silent, start: StartToken | None = None
    ) -> list[Sensitivity]:
        """The sensitivities of all stages in forward order, from calibration tokens [samples, length], which may all
        begin with a start token."""
        scored, fitted = self._begin(tokens, start)
        place = choose_place(len(self.stages) * scored.nbytes, self.runner.device)
        streams = Activations(self.runner.device, place, self._scratch)
        fast = partial(fast_products, self.runner.device)
        found: list[Sensitivity] = []
        for layer, arguments in enumerate(self.runner.arguments(scored.shape[1])):
            parts = self.runner.load(layer, arguments)
            with fast():
                _advance(streams, partial(run_block, parts))
            branches = []
            for number, part in enumerate(parts):
                for trial in self._trials(layer, part, fitted, target_bits):
                    with fast(), _replaced(trial.linears, trial.decoded):
                        branches.append(run_block(parts[number:], scored))
                    found.append(trial.result)
                    on_step(f"{trial.result.modules[0]}  measured", len(self.stages))
                with fast():
                    scored = part.run(scored)
                    _advance(fitted, part.run)
            if branches:
                streams.append(torch.cat(branches))  # [stages * scored, length, hidden]
            self.runner.free(layer)
        divergences = self._divergences(scored, streams)
        return [replace(each, kl=kl) for each, kl in zip(found, divergences, strict=True)]

    def _begin(self, tokens: Tensor, start: StartToken | None) -> tuple[Tensor, Activations]:
        """Hidden states before the first block: those that KL is measured on, and those that the probes are fitted to.

        A method looks better than it is on the very tokens it was fitted to; so these are others, if there are any.
        """
        length = min(LENGTH, tokens.shape[1])
        tokens = shorter_windows(tokens, length, start)
        count = min(SCORED, max(1, len(tokens) // 4))
        others = tokens[count:] if len(tokens) > count else tokens
        others = others[: math.ceil(FITTED_TOKENS * self._widest / length)]
        fitted = Activations(self.runner.device, "host", self._scratch)
        for part in others.split(max(1, self.runner.batch_tokens // length)):
            fitted.append(self.runner.embed(part))
        return self.runner.embed(tokens[:count]).to(self.runner.device), fitted

    def _trials(self, layer: int, part: BlockPart, fitted: Activations, target_bits: float) -> Iterator[_Trial]:
        """What is tried on the stages of a part."""
        for stage in part.stages:
            modules = self.family.modules(layer, stage)
            if modules[0] in self.chosen:
                batches = (part.inputs(stage, batch) for batch in fitted)
                try:
                    yield self._trial(modules, part, stage, stage_statistics(part, stage, batches), target_bits)
                except InputError as error:
                    raise InputError(f"{modules[0]}: {error}") from error

    def _trial(
        self, modules: Group, part: BlockPart, stage: Stage, inputs: list[InputStatistics], target_bits: float
    ) -> _Trial:
        """All experts of a stage are tried together, each rounded by what it reads; scaled where the method does."""
        fmt, width = self.chosen[modules[0]], inputs[0].absmax.numel()
        schemes, probe = candidates(fmt, width), probe_for(fmt, width, target_bits)
        errors = dict.fromkeys(schemes, 0.0)
        linears = [[part.block.get_submodule(name) for name in each.names] for each in stage.by_expert]
        weights = [torch.cat([weight_of(linear) for linear in each]) for each in linears]  # each [out, in]
        scaling = probe_scales(self.method, self.family, self._config, stage, weights, probe, inputs)
        decoded = []
        for own, scales, seen in zip(weights, scaling, inputs, strict=True):
            weight = own.float()
            if scales is not None:
                weight = weight * scales
                seen.divide(scales)
            found = rounding_errors(weight, schemes, seen.require_hessian(), search=self.method.searches_grid)
            errors = {scheme: errors[scheme] + found[scheme] for scheme in schemes}
            rounded = self.method.round(weight, probe, seen).quantized.dequantize()
            decoded.append(rounded if scales is None else rounded / scales)
        every = [linear for each in linears for linear in each]
        return _Trial(every, torch.cat(decoded), Sensitivity(modules, probe, 0.0, errors))

    def _divergences(self, base: Tensor, streams: Activations) -> list[float]:
        """KL(base || stream) of every stream in the order of their branching off, in nats per token."""
        base = base.flatten(0, 1)  # [positions, hidden]
        sums = [0.0] * len(self.stages)
        for start in range(0, len(base), POSITIONS):
            part = slice(start, start + POSITIONS)
            logits = self.runner.logits(base[part])
            states = (each for batch in streams for each in batch.flatten(0, 1).split(len(base)))
            for index, each in enumerate(states):
                sums[index] += float(token_divergence(logits, self.runner.logits(each[part])).sum())
        means = [total / len(base) for total in sums]
        return [max(mean, 0.0) if math.isfinite(mean) else RUINED for mean in means]


@dataclass(frozen=True)
class _Trial:
    """A stage under test: its linears, their weights [out, in] as the probe has them, and what is known so far."""

    linears: list[nn.Module]
    decoded: Tensor
    result: Sensitivity


def _advance(states: Activations, step: Callable[[Tensor], Tensor]) -> None:
    for index, batch in enumerate(states):
        states[index] = step(batch)


@contextmanager
def _replaced(linears: list[nn.Module], decoded: Tensor) -> Iterator[None]:
    """For a moment, linears with other weights, given stacked [out, in]."""
    kept = [weight_of(linear) for linear in linears]
    parts = decoded.split([len(weight) for weight in kept])
    try:
        for linear, weight, part in zip(linears, kept, parts, strict=True):
            linear.weight.data = part.to(weight.dtype)
        yield
    finally:
        for linear, weight in zip(linears, kept, strict=True):
            linear.weight.data = weight
