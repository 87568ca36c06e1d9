"""What a model loses when one group of layers alone is quantized, measured for every group in one pass.

The unquantized model runs block by block over a few sequences. At every group a stream branches off: the hidden states
as they become when this group alone is rounded to few bits, by the recipe's own method. All streams run on through the
blocks behind, and KL(original || stream) at the end is what the rounding of this group costs. Only one block is in
memory at a time; the streams are kept wherever they fit.
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

from quantkit.arch import Family, Group
from quantkit.blocks import BATCH_TOKENS, POSITIONS, BlockRunner, Half, run_block, weight_of
from quantkit.checkpoint import Checkpoint
from quantkit.divergence import token_divergence
from quantkit.errors import InputError
from quantkit.formats import IntegerFormat
from quantkit.methods import Method
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.sensitivity import Sensitivity, candidates, probe_for, rounding_errors
from quantkit.methods.statistics import InputStatistics
from quantkit.passes.activations import Activations, choose_place
from quantkit.progress import Progress, silent

# On a model of 135 M weights 4 x 128 tokens chose bits that lose 1 to 2 % more than those chosen by 4 x 256, and 4 x 32
# up to 10 %. Products in bfloat16 (`fast_products`) add up to 2e-4 nats to every KL there, less than the tokens do.
LENGTH = 128  # tokens of a sequence; longer ones are cut into pieces
SCORED = 4  # sequences that KL is measured on
FITTED_TOKENS = 4  # for each input of the widest layer: for the statistics that the method rounds by
RUINED = 100.0  # nats, for a probe that computes NaN


class SensitivityPass:
    """The pass over all blocks. Layers of one group share a format in `chosen`."""

    def __init__(
        self,
        source: Checkpoint,
        family: Family,
        chosen: Mapping[str, IntegerFormat],
        method: Method,
        device: str,
        scratch: Path,
    ) -> None:
        self.family, self.chosen, self.method = family, chosen, method
        self.runner = BlockRunner(source, family, device)
        self.groups = [group for group in family.linear_groups(source.config) if group[0] in chosen]
        self._widest = max(source.tensors[f"{group[0]}.weight"].info.shape[1] for group in self.groups)
        self._scratch = scratch  # for streams that do not fit into memory

    @torch.no_grad()
    def run(self, tokens: Tensor, target_bits: float, on_step: Progress = silent) -> list[Sensitivity]:
        """The sensitivities of all groups in forward order, from calibration tokens [samples, length]."""
        scored, fitted = self._begin(tokens)
        place = choose_place(len(self.groups) * scored.nbytes, self.runner.device)
        streams = Activations(self.runner.device, place, self._scratch)
        fast = partial(fast_products, self.runner.device)
        found: list[Sensitivity] = []
        for layer, arguments in enumerate(self.runner.arguments(scored.shape[1])):
            halves = self.runner.load(layer, arguments)
            with fast():
                _advance(streams, partial(run_block, halves))
            branches = []
            for half, behind in ((halves[0], halves[1]), (halves[1], None)):
                for trial in self._trials(layer, half, fitted, target_bits):
                    with fast():
                        branches.append(_branch(trial, half, behind, scored))
                    found.append(trial.result)
                    on_step(f"{trial.result.modules[0]}  measured", len(self.groups))
                with fast():
                    scored = _through(half, scored)
                    _advance(fitted, partial(_through, half))
            if branches:
                streams.append(torch.cat(branches))  # [groups * scored, length, hidden]
            self.runner.free(layer)
        with fast():
            divergences = self._divergences(scored, streams)
        return [replace(each, kl=kl) for each, kl in zip(found, divergences, strict=True)]

    def _begin(self, tokens: Tensor) -> tuple[Tensor, Activations]:
        """Hidden states before the first block: those that KL is measured on, and those that the probes are fitted to.

        A method looks better than it is on the very tokens it was fitted to; so these are others, if there are any.
        """
        length = min(LENGTH, tokens.shape[1])
        tokens = torch.cat([part for part in tokens.split(length, 1) if part.shape[1] == length])
        count = min(SCORED, max(1, len(tokens) // 4))
        others = tokens[count:] if len(tokens) > count else tokens
        others = others[: math.ceil(FITTED_TOKENS * self._widest / length)]
        fitted = Activations(self.runner.device, "host", self._scratch)
        for part in others.split(max(1, BATCH_TOKENS // length)):
            fitted.append(self.runner.embed(part))
        return self.runner.embed(tokens[:count]).to(self.runner.device), fitted

    def _trials(self, layer: int, half: Half, fitted: Activations, target_bits: float) -> Iterator[_Trial]:
        """What is tried on the groups of a half."""
        for names, read in ((half.first, half.inputs), ((half.last,), half.inner)):
            group = tuple(f"{self.family.blocks}.{layer}.{name}" for name in names)
            if group[0] in self.chosen:
                linears = [half.block.get_submodule(name) for name in names]
                try:
                    yield self._trial(group, linears, _statistics(read, fitted), target_bits)
                except InputError as error:
                    raise InputError(f"{group[0]}: {error}") from error

    def _trial(self, group: Group, linears: list[nn.Module], inputs: InputStatistics, target_bits: float) -> _Trial:
        weight = torch.cat([weight_of(linear) for linear in linears]).float()  # [out, in]
        fmt, width = self.chosen[group[0]], weight.shape[1]
        hessian, search = inputs.require_hessian(), self.method.searches_grid
        errors = rounding_errors(weight, candidates(fmt, width), hessian, search=search)
        probe = probe_for(fmt, width, target_bits)
        rounded = self.method.round(weight, probe, inputs).quantized
        return _Trial(linears, rounded.dequantize(), Sensitivity(group, probe, 0.0, errors))

    def _divergences(self, base: Tensor, streams: Activations) -> list[float]:
        """KL(base || stream) of every stream in the order of their branching off, in nats a token."""
        base = base.flatten(0, 1)  # [positions, hidden]
        sums = [0.0] * len(self.groups)
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
    """A group under test: its linears, their weights [out, in] as the probe has them, and what is known so far."""

    linears: list[nn.Module]
    decoded: Tensor
    result: Sensitivity


def _branch(trial: _Trial, half: Half, behind: Half | None, scored: Tensor) -> Tensor:
    """The hidden states behind a block in which one group of this half has the weights of a probe."""
    with _replaced(trial.linears, trial.decoded):
        states = _through(half, scored)
    return states if behind is None else _through(behind, states)


def _through(half: Half, states: Tensor) -> Tensor:
    return half.close(states, half.inner(states))


def _advance(states: Activations, step: Callable[[Tensor], Tensor]) -> None:
    for index, batch in enumerate(states):
        states[index] = step(batch)


def _statistics(read: Callable[[Tensor], Tensor], states: Activations) -> InputStatistics:
    """Of what the linears of a group read."""
    statistics = None
    for batch in states:
        with fast_products(batch.device):
            inputs = read(batch)
            statistics = statistics or InputStatistics(inputs.shape[-1], inputs.device)
            statistics.add(inputs)
    assert statistics is not None
    return statistics


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
