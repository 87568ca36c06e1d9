"""Where the damage is: the error that every linear adds, and what has piled up after every block.

Local: both blocks start from the hidden states of the unquantized model, and so does each stage of them. A linear's
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
from quantkit.blocks import BlockPart, BlockRunner, run_block
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.eval.quality.folds import FoldedScales, folded_scales
from quantkit.progress import Progress, silent
from quantkit.sources import model_folder
from quantkit.stages import Stage

_SAME_KEYS = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
_Parts = tuple[BlockPart, ...]


class WorstLinear(NamedTuple):
    layer: int
    linear: str
    error: float


@dataclass(frozen=True)
class LayerErrors:
    """Relative errors, one for each layer."""

    # Local, by short name: `q_proj`. Of all experts together; None in a layer that has no such linear.
    linears: Mapping[str, tuple[float | None, ...]]
    blocks: tuple[float, ...]  # accumulated

    def worst(self, count: int) -> list[WorstLinear]:
        found = [WorstLinear(layer, name, error) for name, errors in self.linears.items()
                 for layer, error in enumerate(errors) if error is not None]  # fmt: skip
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
    linears: list[dict[str, float]] = []  # of every layer
    blocks: list[float] = []
    for layer in range(len(runners[0])):
        original, rounded = (
            runner.load(layer, given[layer]) for runner, given in zip(runners, arguments, strict=True)
        )  # fmt: skip
        linears.append(_local_errors(original, rounded, hidden[0], family, checkpoints[0]))
        for states, parts in zip(hidden, (original, rounded), strict=True):
            states[:] = [run_block(parts, window) for window in states]
        blocks.append(_drift(*hidden))
        for runner in runners:
            runner.free(layer)
        on_block(f"block {layer}", len(runners[0]))
    names = dict.fromkeys(name for errors in linears for name in errors)
    return LayerErrors({name: tuple(errors.get(name) for errors in linears) for name in names}, tuple(blocks))


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
    original: _Parts, rounded: _Parts, hidden: list[Tensor], family: Family, checkpoint: Checkpoint
) -> dict[str, float]:
    """The errors of a block's linears on the original's hidden states, by short name."""
    folds = _find_folds(original, rounded, hidden, family, checkpoint)
    sums = _Sums()
    for states in hidden:
        for ours, theirs in zip(original, rounded, strict=True):
            states = _compare_part(ours, theirs, states, folds, sums)
    return sums.errors()


def _compare_part(
    ours: BlockPart, theirs: BlockPart, hidden: Tensor, folds: Mapping[str, FoldedScales], sums: _Sums
) -> Tensor:
    """Adds up the differences in one part. Returns the original's hidden states after it."""
    inputs: list[Tensor | None] = []
    for stage in ours.stages:
        inputs = ours.inputs(stage, hidden)
        for each, read in zip(stage.by_expert, inputs, strict=True):
            if read is None:
                continue
            served = _served_inputs(ours, theirs, each, read, folds)
            for name in each.names:
                wanted, found = _outputs(name, (ours, theirs), (read, served))
                undone = name in folds and folds[name].producer == name
                sums.add(name.rpartition(".")[2], folds[name].unfolded(found) if undone else found, wanted)
    inner = inputs[0] if ours.closing else None
    return ours.run(hidden) if inner is None else ours.close(hidden, inner)


def _served_inputs(
    ours: BlockPart,
    theirs: BlockPart,
    stage: Stage,
    read: Tensor,
    folds: Mapping[str, FoldedScales],
) -> Tensor:
    """What the quantized stage reads where the original reads `read`: divided by the scales that it took."""
    if stage.fold is not None and stage.fold.kind == "norm":  # both norms start from the same hidden states
        ones = torch.ones(1, read.shape[-1], device=read.device)
        before, after = (part.block.get_submodule(stage.fold.producer)(ones) for part in (ours, theirs))
        return read * torch.where(before == 0, 1.0, after / before)[0].to(read.dtype)
    name = stage.names[0]
    return read / folds[name].columns if name in folds and folds[name].consumer == name else read


def _outputs(name: str, parts: _Parts, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    wanted, found = (part.block.get_submodule(name)(read) for part, read in zip(parts, inputs, strict=True))
    return wanted, found


def _find_folds(
    original: _Parts, rounded: _Parts, hidden: list[Tensor], family: Family, checkpoint: Checkpoint
) -> dict[str, FoldedScales]:
    """By the names of both linears of a fold, each from the first window that reaches it.

    Folds into norms need no care: both norms start from the same hidden states.
    """
    found: dict[str, FoldedScales] = {}
    count = sum(len(_linear_folds(part)) for part in original)
    for states in hidden:
        for ours, theirs in zip(original, rounded, strict=True):
            consumers = _linear_folds(ours)
            reads = ours.read_by(list(consumers), states)
            for (producer, consumer), read in zip(consumers.items(), reads, strict=True):
                if read is None or producer in found:
                    continue
                stage = next(one for stage in ours.stages for one in stage.by_expert if producer in one.names)
                served = _served_inputs(ours, theirs, stage, read, found)
                outputs = _outputs(producer, (ours, theirs), (read, served))
                scales = folded_scales(consumer, family, checkpoint.config, (ours.block, theirs.block), outputs)
                found[producer] = found[scales.consumer] = scales
            states = ours.run(states)
        if len(found) == 2 * count:
            break
    return found


def _linear_folds(part: BlockPart) -> dict[str, Stage]:
    """The stages, those of every expert alone, whose scales go into a linear, by the name of that linear."""
    stages = (one for stage in part.stages for one in stage.by_expert)
    return {one.fold.producer: one for one in stages if one.fold is not None and one.fold.kind != "norm"}


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
