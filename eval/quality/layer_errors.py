"""Where the damage is: the error that every linear adds, and what has piled up behind every block.

Local: both blocks start from the hidden states of the unquantized model, and so does each half of them. A linear's
error is ||y_q - y|| / ||y|| over all tokens, where y is the original's output, and y_q the quantized one's on the same
input, rounded as served where the format does so. Scales folded into a norm are undone by the norm itself, those folded
into v_proj and up_proj by `folds.py`; what is left is error.

Accumulated: the quantized blocks run on their own outputs, as in service. A block's error is ||h_q - h|| / ||h|| of a
token's hidden states behind it, averaged over tokens: a few tokens of most models are a thousand times larger than the
others, and a norm over all tokens would be about them alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.arch import Family, family_of
from quantkit.blocks import BlockRunner, Half, run_block
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.eval.quality.folds import FoldedScales, folded_scales, linear_folds
from quantkit.progress import Progress, silent
from quantkit.sources import model_folder

_SAME_KEYS = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
_Halves = tuple[Half, Half]


class WorstLinear(NamedTuple):
    layer: int
    linear: str
    error: float


@dataclass(frozen=True)
class LayerErrors:
    """Relative errors, one for each layer."""

    linears: Mapping[str, tuple[float, ...]]  # local, by short name: `q_proj`
    blocks: tuple[float, ...]  # accumulated

    def worst(self, count: int) -> list[WorstLinear]:
        found = [WorstLinear(layer, name, error) for name, errors in self.linears.items()
                 for layer, error in enumerate(errors)]  # fmt: skip
        return sorted(found, key=lambda one: -one.error)[:count]

    def to_dict(self) -> dict[str, Any]:
        return {"linears": {name: list(errors) for name, errors in self.linears.items()}, "blocks": list(self.blocks)}


@dataclass
class _Sums:
    """Squares of differences and of original outputs, by the linear's name."""

    wrong: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    whole: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, found: Tensor, wanted: Tensor) -> None:
        self.wrong[name] += float((found.double() - wanted.double()).square().sum())
        self.whole[name] += float(wanted.double().square().sum())

    def errors(self) -> dict[str, float]:
        return {name: _ratio(self.wrong[name], self.whole[name]) ** 0.5 for name in self.wrong}


@torch.no_grad()
def layer_errors(
    base: str | Path, quantized: str | Path, ids: Tensor, device: str = "cpu", on_block: Progress = silent
) -> LayerErrors:
    """Errors on token ids [windows, window]. One block of each model is in memory at a time."""
    checkpoints = [Checkpoint(model_folder(model)) for model in (base, quantized)]
    family = _common_family(*checkpoints)
    runners = [BlockRunner(checkpoint, family, device) for checkpoint in checkpoints]
    hidden = [list(runner.embed(ids).to(runner.device).split(1)) for runner in runners]  # each [1, window, hidden]
    arguments = [runner.arguments(ids.shape[1]) for runner in runners]
    linears: defaultdict[str, list[float]] = defaultdict(list)
    blocks: list[float] = []
    for layer in range(len(runners[0])):
        original, rounded = (
            runner.load(layer, given[layer]) for runner, given in zip(runners, arguments, strict=True)
        )  # fmt: skip
        for name, error in _local_errors(original, rounded, hidden[0], family, checkpoints[0]).items():
            linears[name.rpartition(".")[2]].append(error)
        for states, halves in zip(hidden, (original, rounded), strict=True):
            states[:] = [run_block(halves, part) for part in states]
        blocks.append(_drift(*hidden))
        for runner in runners:
            runner.free(layer)
        on_block(f"block {layer}", len(runners[0]))
    return LayerErrors({name: tuple(errors) for name, errors in linears.items()}, tuple(blocks))


def _common_family(base: Checkpoint, quantized: Checkpoint) -> Family:
    for key in _SAME_KEYS:
        given = base.config.get(key), quantized.config.get(key)
        if given[0] != given[1]:
            raise InputError(
                f"{key} is {given[0]} in {base.folder} and {given[1]} in {quantized.folder}; choose the model that the "
                "quantized one was made from"
            )
    return family_of(base.config)


def _local_errors(
    original: _Halves, rounded: _Halves, hidden: list[Tensor], family: Family, checkpoint: Checkpoint
) -> dict[str, float]:
    """The errors of a block's linears on the original's hidden states, by name inside the block."""
    folds = _find_folds(original, rounded, hidden[0], family, checkpoint)
    sums = _Sums()
    for states in hidden:
        for ours, theirs in zip(original, rounded, strict=True):
            states = _compare_half(ours, theirs, states, folds, sums)
    return sums.errors()


def _compare_half(
    ours: Half, theirs: Half, hidden: Tensor, folds: Mapping[str, FoldedScales], sums: _Sums
) -> Tensor:  # fmt: skip
    """Adds up the differences in one half. Returns the original's hidden states behind it."""
    inputs = ours.inputs(hidden), theirs.inputs(hidden)
    for name in ours.first:
        wanted, found = (half.block.get_submodule(name)(x) for half, x in zip((ours, theirs), inputs, strict=True))
        sums.add(name, folds[name].unfolded(found) if name in folds else found, wanted)
    inner = ours.inner(hidden)
    folded = inner / folds[ours.last].columns if ours.last in folds else inner
    wanted, found = ours.block.get_submodule(ours.last)(inner), theirs.block.get_submodule(ours.last)(folded)
    sums.add(ours.last, found, wanted)
    return ours.close(hidden, inner)


def _find_folds(
    original: _Halves, rounded: _Halves, hidden: Tensor, family: Family, checkpoint: Checkpoint
) -> dict[str, FoldedScales]:
    """By the names of both linears of a fold, from one window."""
    found: dict[str, FoldedScales] = {}
    for ours, theirs in zip(original, rounded, strict=True):
        for fold in linear_folds(family):
            if fold.producer not in ours.first:
                continue
            outputs = (
                ours.block.get_submodule(fold.producer)(ours.inputs(hidden)),
                theirs.block.get_submodule(fold.producer)(theirs.inputs(hidden)),
            )
            scales = folded_scales(fold, family, checkpoint.config, (ours.block, theirs.block), outputs)
            found[scales.producer] = found[scales.consumer] = scales
        hidden = ours.close(hidden, ours.inner(hidden))
    return found


def _drift(original: list[Tensor], drifted: list[Tensor]) -> float:
    """Mean over tokens of the relative error of a token's hidden states."""
    errors = [
        (theirs - ours).float().norm(dim=-1) / ours.float().norm(dim=-1).clamp(min=1e-30)
        for ours, theirs in zip(original, drifted, strict=True)
    ]
    return float(torch.cat(errors).double().mean())


def _ratio(wrong: float, whole: float) -> float:
    """0 where both are: an output that is zero in both models is right."""
    return 0.0 if wrong == 0 else wrong / max(whole, 1e-300)
