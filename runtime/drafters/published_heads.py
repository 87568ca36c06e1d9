"""Medusa heads as others publish them: residual layers on the last hidden state, and an output layer for each head.

    x   = h                               the state that the lm head reads; the token chosen from it is not looked at
    x   = x + silu(W x + b)               for every layer
    head i's logits, for the token i + 1 behind the chosen one: by its own output layer, one for all, or the model's

Two layouts are read, both from safetensors:

    Medusa, TGI   medusa_lm_head.safetensors: `I.J.linear.weight`, `I.J.linear.bias`; `I.N.weight` is head I's output
                  layer behind N layers, where it has one
    vLLM          model.safetensors: `blocks.I.layers.J.weight`, perhaps `.bias`; `lm_heads.I.weight`, or one for all
                  heads where config.json says `original_lm_head`; `token_map`, where outputs are some tokens only

A pickle (`medusa_lm_head.pt`) can run any code when it is opened, so none is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from quantkit.checkpoint import read_json
from quantkit.errors import InputError, StorageError
from quantkit.runtime.drafters.medusa_heads import FACTS, MOST_HEADS, MOST_LAYERS, Target
from quantkit.runtime.drafters.medusa_tree import MOST_NODES, choose_tree
from quantkit.runtime.model.decoder import AnyDecoder

FILES = ("medusa_lm_head.safetensors", "model.safetensors")
PICKLE = "medusa_lm_head.pt"
_PREFIXES = re.compile(r"^(medusa_heads?|heads)\.")
_LAYER = re.compile(r"^(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)$")
_OUTPUT = re.compile(r"^(?:(\d+)\.\d+|lm_heads\.(\d+))\.weight$")
# How often guesses are right, by head and rank. Published heads do not say; a tree needs some order of their choices.
_FIRST, _NEXT_HEAD, _NEXT_RANK, _RANKS = 0.6, 0.75, 0.3, 4


class PublishedHeads(nn.Module):
    def __init__(
        self, weights: Tensor, biases: Tensor | None, outputs: tuple[Tensor, ...], token_map: Tensor | None
    ) -> None:
        """`weights` [layers, heads, hidden, hidden], `biases` [layers, heads, hidden]. `outputs` [tokens, hidden] of
        each head; one for all; none: the model's. `token_map`: which tokens these are."""
        super().__init__()
        self.weights, self.biases, self.outputs, self.token_map = weights, biases, outputs, token_map
        accuracies = [[_FIRST * _NEXT_HEAD**head * _NEXT_RANK**rank for rank in range(_RANKS)]
                      for head in range(self.count)]  # fmt: skip
        self.tree = choose_tree(accuracies, MOST_NODES)

    @property
    def count(self) -> int:
        return self.weights.shape[1]

    def hidden(self, h: Tensor) -> Tensor:
        """What an output layer reads, [heads, rows, hidden], for states [rows, hidden]."""
        x = h.expand(self.count, *h.shape)
        for layer, weight in enumerate(self.weights):
            ahead = x @ weight.transpose(1, 2)
            x = x + functional.silu(ahead if self.biases is None else ahead + self.biases[layer][:, None])
        return x

    def best_tokens(self, h: Tensor, tokens: Tensor, decoder: AnyDecoder, ranks: int) -> Tensor:
        """As `MedusaHeads.best_tokens`; the chosen tokens are not looked at."""
        x = self.hidden(h)
        if self.outputs:
            outputs = self.outputs if len(self.outputs) > 1 else self.outputs * self.count
            own = (one @ output.T for one, output in zip(x, outputs, strict=True))
            best = torch.stack([each.topk(ranks, dim=-1).indices for each in own])
            return best if self.token_map is None else self.token_map[best]
        logits = decoder.logits(x.flatten(0, 1))
        return logits.topk(ranks, dim=-1).indices.view(*x.shape[:2], ranks)


def find_published(named: str | Path) -> Path | None:
    """The file with published heads in this folder; None where it has heads of our own, or none."""
    folder = Path(named)
    if (folder / FACTS).exists():
        return None
    names = FILES if _config(folder).get("model_type") == "medusa" else FILES[:1]  # else these are a model's weights
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None and (folder / PICKLE).is_file():
        raise StorageError(
            f"{folder / PICKLE} is a pickle, which can run any code when it is opened; convert it where you trust it: "
            'python -c "import torch; from safetensors.torch import save_file; save_file({name: one.contiguous() '
            f"for name, one in torch.load('{PICKLE}', weights_only=True, map_location='cpu').items()}}, '{FILES[0]}')\""
        )
    return found


def load_published(file: Path, target: Target, device: str | torch.device, dtype: torch.dtype) -> PublishedHeads:
    try:
        given = {_PREFIXES.sub("", name): tensor for name, tensor in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{file} is damaged ({error}); download it again") from error
    config = _config(file.parent)
    read = _Reader(file, given, target)
    layers, heads = read.sizes(
        config.get("medusa_num_layers", config.get("num_hidden_layers")),
        config.get("medusa_num_heads", config.get("num_heads")),
    )
    weights = torch.stack([torch.stack([read.layers[head, layer, "weight"] for head in range(heads)])
                           for layer in range(layers)])  # fmt: skip
    biases = None
    if any(kind == "bias" for _, _, kind in read.layers):
        zeros = weights.new_zeros(target.hidden_size)
        biases = torch.stack([torch.stack([read.layers.get((head, layer, "bias"), zeros) for head in range(heads)])
                              for layer in range(layers)])  # fmt: skip
    outputs, token_map = read.outputs(heads, bool(config.get("original_lm_head")))
    return PublishedHeads(
        weights.to(device, dtype),
        None if biases is None else biases.to(device, dtype),
        tuple(output.to(device, dtype) for output in outputs),
        None if token_map is None else token_map.to(device, torch.int64),
    ).eval()


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return read_json(file, "download the whole folder again") if file.is_file() else {}


@dataclass(frozen=True)
class _Reader:
    """The tensors of one file, checked."""

    file: Path
    given: Mapping[str, Tensor]
    target: Target

    @property
    def layers(self) -> dict[tuple[int, int, str], Tensor]:
        """By head, layer, and `weight` or `bias`."""
        found = {}
        for name, tensor in self.given.items():
            match = _LAYER.match(name)
            if match:
                numbers = [int(number) for number in match.groups()[:4] if number is not None]
                found[numbers[0], numbers[1], match[5]] = tensor
        return found

    def sizes(self, layers: object, heads: object) -> tuple[int, int]:
        """Of all heads alike; held against what config.json says, where it does."""
        weights = {(head, layer) for head, layer, kind in self.layers if kind == "weight"}
        found = 1 + max((layer for _, layer in weights), default=-1), 1 + max((head for head, _ in weights), default=-1)
        whole = weights == {(head, layer) for head in range(found[1]) for layer in range(found[0])}
        if not weights or not whole or layers not in (None, found[0]) or heads not in (None, found[1]):
            raise StorageError(
                f"{self.file} has {found[1]} medusa heads of {found[0]} layers{'' if whole else ', some missing'}, but "
                f"config.json says {heads} of {layers}; download the whole folder again"
            )
        if found[0] > MOST_LAYERS or found[1] > MOST_HEADS:
            raise InputError(
                f"{self.file} has {found[1]} medusa heads of {found[0]} layers; at most {MOST_HEADS} of {MOST_LAYERS} "
                "are supported"
            )
        hidden = self.target.hidden_size
        for (head, layer, kind), tensor in self.layers.items():
            shape = [hidden, hidden] if kind == "weight" else [hidden]
            if list(tensor.shape) != shape:
                raise InputError(
                    f"layer {layer} of medusa head {head} in {self.file} has a {kind} of shape {list(tensor.shape)}, "
                    f"the model needs {shape}; the heads belong to another model"
                )
            self._check_finite(f"layer {layer} of head {head}", tensor)
        return found

    def outputs(self, heads: int, shared: bool) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Output layers, and which tokens they are about where that is not all."""
        own = {
            int(match[1] or match[2]): tensor for name, tensor in self.given.items() if (match := _OUTPUT.match(name))
        }
        found: tuple[Tensor, ...]
        if shared:
            one = self.given.get("lm_head.weight", own.get(0))
            found = () if one is None else (one,)
        elif not own:
            found = ()
        elif sorted(own) != list(range(heads)):
            raise StorageError(
                f"{self.file} has output layers for the medusa heads {sorted(own)}, but there are {heads} heads; "
                "download the whole folder again"
            )
        else:
            found = tuple(own[head] for head in range(heads))
        token_map, vocab, hidden = self.given.get("token_map"), self.target.vocab_size, self.target.hidden_size
        if token_map is not None and (token_map.dim() != 1 or not bool(((token_map >= 0) & (token_map < vocab)).all())):
            raise InputError(f"token_map in {self.file} names tokens that the model of {vocab} tokens does not have")
        rows = vocab if token_map is None else len(token_map)
        if token_map is not None:
            found = tuple(one[token_map] if len(one) == vocab else one for one in found)
        for head, output in enumerate(found):
            if output.shape != (rows, hidden):
                raise InputError(
                    f"the output layer of medusa head {head} in {self.file} has shape {list(output.shape)}, the model "
                    f"needs {[rows, hidden]}; the heads belong to another model"
                )
            self._check_finite(f"the output layer of head {head}", output)
        return found, token_map if found else None

    def _check_finite(self, what: str, tensor: Tensor) -> None:
        if not bool(torch.isfinite(tensor).all()):
            raise StorageError(f"{what} in {self.file} holds NaN or Inf; download it again")
