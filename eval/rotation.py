"""A model with its hidden states rotated: the same answers from other weights, whose outliers are spread out.

    python -m quantkit.eval.rotation demo-draft rotated --residual --values
    quantkit quantize rotated -r gptq-w3g64 -o rotated-w3
    quantkit eval rotated-w3 --base demo-draft

`--residual` turns the hidden states between blocks by one orthogonal matrix: embeddings and everything that writes to
them are multiplied with it, everything that reads them with its inverse. Norms must have weights of 1 then, so theirs
go into the layers that read them. An output layer that was tied to the embeddings becomes one of its own. `--values`
turns every head of values, and undoes it in the layer after attention. Nothing is left to do while a model runs
(QuaRot's and SpinQuant's rotations that can be folded; arXiv 2404.00456, 2405.16406).

What it brings is in docs/explanations/quantization.md. Hidden states that another norm reads before they are added
(Gemma 2 and 3) and latent attention are refused.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantkit.arch import Family, family_of
from quantkit.checkpoint import Checkpoint
from quantkit.checkpoint_writer import CheckpointWriter
from quantkit.errors import InputError
from quantkit.formats.base import DTYPES
from quantkit.sources import model_folder
from quantkit.stages import Stage

Change = Callable[[Tensor], Tensor]
EMBEDDINGS, FINAL_NORM, HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"


def rotate_model(
    model: str | Path, output: Path, *, residual: bool, values: bool, dtype: str | None = None, seed: int = 0
) -> None:
    """Writes the rotated model as a folder, in its own dtype unless another is given."""
    source = Checkpoint(model_folder(model))
    if source.formats:
        raise InputError(f"{source.origin} is quantized; rotate the original model")
    family = family_of(source.config)
    _check(source, family, residual)
    stored = DTYPES[dtype or source.dtype]
    rotation = _Rotation(source, family, residual, values, seed)
    config = source.config | {"dtype": dtype or source.dtype}
    if residual:
        config |= {"tie_word_embeddings": False}
    with CheckpointWriter(output) as writer:
        for name in source.tensors:
            writer.add(name, rotation.changed(name, source.tensor(name)).to(stored))
        if residual and HEAD not in source.tensors:
            writer.add(HEAD, rotation.changed(HEAD, source.tensor(rotation.embeddings)).to(stored))
        writer.add_json("config.json", config)
        for file in source.side_files():
            writer.add_file(file)
        writer.finish()


def orthogonal(size: int, seed: int) -> Tensor:
    """A matrix [size, size] in float64: Hadamard's for the power of two in it, random for the rest, random signs."""
    generator = torch.Generator().manual_seed(seed)
    power = size & -size
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < power:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    rest, _ = torch.linalg.qr(torch.randn(size // power, size // power, generator=generator, dtype=torch.float64))
    signs = torch.randint(0, 2, (size, 1), generator=generator).double() * 2 - 1
    return signs * torch.kron(rest.contiguous(), matrix / math.sqrt(power))


class _Rotation:
    """What becomes of every tensor; those that are not named stay."""

    def __init__(self, source: Checkpoint, family: Family, residual: bool, values: bool, seed: int) -> None:
        self._source, self._family = source, family
        self._root = family.blocks.rpartition(".")[0]
        self._turned = orthogonal(int(source.config["hidden_size"]), seed)
        self._changes: dict[str, list[Change]] = {}
        if residual:
            self._turn_residual()
        if values:
            self._turn_values(seed + 1)

    @property
    def embeddings(self) -> str:
        return f"{self._root}.{EMBEDDINGS}"

    def changed(self, name: str, tensor: Tensor) -> Tensor:
        changed = tensor.double()
        for change in self._changes.get(name, ()):
            changed = change(changed)
        return changed

    def _turn_residual(self) -> None:
        turned, family, config = self._turned, self._family, self._source.config
        self._add(self.embeddings, lambda rows: rows @ turned)
        self._reads([HEAD], f"{self._root}.{FINAL_NORM}")
        for layer in range(int(config["num_hidden_layers"])):
            block = f"{family.blocks}.{layer}"
            for norm in {stage.part.norm for stage in family.stages(layer, config)}:
                readers = [name for stage in family.stages(layer, config) for name in _readers(stage, norm)]
                self._reads([f"{block}.{name}.weight" for name in dict.fromkeys(readers)], f"{block}.{norm}.weight")
            for stage in family.stages(layer, config):
                if stage.role in ("output", "down", "shared_down"):
                    for module in family.modules(layer, stage):
                        self._add(f"{module}.weight", lambda weight: turned.T @ weight)
                        self._add(f"{module}.bias", lambda bias: bias @ turned)

    def _reads(self, weights: Sequence[str], norm: str) -> None:
        """Of these, which read what a norm puts out; the norm multiplies by 1 afterwards."""
        offset = self._family.norm_offset
        factors = self._source.tensor(norm).double() + offset
        for name in weights:
            self._add(name, lambda weight: (weight * factors) @ self._turned)
        self._add(norm, lambda weight: torch.ones_like(weight) - offset)

    def _turn_values(self, seed: int) -> None:
        family, config = self._family, self._source.config
        size = family.size_of_head(config)
        turned = orthogonal(size, seed)
        for layer in range(int(config["num_hidden_layers"])):
            for stage in family.stages(layer, config):
                if stage.fold is not None and stage.fold.kind == "value":
                    producer = f"{family.blocks}.{layer}.{stage.fold.producer}"
                    last = family.folded_outputs(stage.fold, 0, config)
                    for name in ("weight", "bias"):
                        self._add(f"{producer}.{name}", partial(_heads_turned, turned=turned, last=last))
                    (module,) = family.modules(layer, stage)
                    self._add(f"{module}.weight", lambda weight: (weight.unflatten(1, (-1, size)) @ turned).flatten(1))

    def _add(self, name: str, change: Change) -> None:
        self._changes.setdefault(name, []).append(change)


def _readers(stage: Stage, norm: str) -> list[str]:
    """The linears of a stage that read what the norm puts out, and small ones beside them."""
    fold = stage.fold
    return [*stage.linears, *fold.also] if fold is not None and (fold.kind, fold.producer) == ("norm", norm) else []


def _heads_turned(rows: Tensor, turned: Tensor, last: int) -> Tensor:
    """The last rows [.., in], or entries of a bias, head by head."""
    kept, heads = rows[:-last], rows[-last:].unflatten(0, (-1, len(turned)))
    return torch.cat([kept, torch.einsum("hi...,ij->hj...", heads, turned).flatten(0, 1)])


def _check(source: Checkpoint, family: Family, residual: bool) -> None:
    stages = [
        stage
        for layer in range(int(source.config["num_hidden_layers"]))
        for stage in family.stages(layer, source.config)
    ]
    if family.latent:
        raise InputError(f"latent attention ('{family.model_type}') cannot be rotated here")
    if residual and any(stage.part.post_norm for stage in stages):
        raise InputError(f"'{family.model_type}' has norms after its layers; their hidden states cannot be rotated")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m quantkit.eval.rotation", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--residual", action="store_true")
    parser.add_argument("--values", action="store_true")
    parser.add_argument("--dtype", choices=tuple(DTYPES))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    if not (asked.residual or asked.values):
        parser.error("nothing to rotate; give --residual, --values or both")
    chosen = {"residual": asked.residual, "values": asked.values}
    rotate_model(asked.model, asked.output, **chosen, dtype=asked.dtype, seed=asked.seed)


if __name__ == "__main__":
    main()
