"""The heads, and their two files: `medusa.safetensors` with the weights, `medusa.json` with everything else.

With the hidden state of position t (what the lm head reads) the model chose the token at t+1; head 1 guesses the one at
t+2, head 2 the one at t+3, and so on. Besides the hidden state, heads see the embedding of the token that was chosen at
t+1, which the hidden state alone does not tell:

    z   = h' + U e'                       h', e': hidden state and embedding, each divided by its rms
    x_i = a_i z + silu(W_i1 z)            a_i: a factor for each channel
    x_i = x_i + silu(W_ik x_i)            for every layer k behind the first
    h_i = rms(h) x_i

and the model's own lm head turns h_i into logits. U is shared, so a head of one layer is one matrix.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional

from quantkit.checkpoint import Checkpoint, read_json
from quantkit.errors import InputError, StorageError
from quantkit.runtime.drafters.medusa_tree import Tree, chain
from quantkit.runtime.model.decoder import AnyDecoder
from quantkit.sources import bundled_folder
from quantkit.storage import replacing, storage_errors

VERSION = 1
WEIGHTS, FACTS = "medusa.safetensors", "medusa.json"
BUNDLED = "demo-medusa"
MOST_HEADS = 8
MOST_LAYERS = 4
_EPSILON = 1e-6


@dataclass(frozen=True)
class Target:
    """What heads must know about the model they belong to. The same before and after its blocks are quantized."""

    model_type: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    norm_sha256: str  # of the final norm's weights as float32: other models of the same shape have others

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Target:
        norm = checkpoint.tensor("model.norm.weight").float().contiguous()
        config = checkpoint.config
        return cls(
            str(config.get("model_type")),
            int(config["hidden_size"]),
            int(config["vocab_size"]),
            int(config["num_hidden_layers"]),
            hashlib.sha256(norm.numpy().tobytes()).hexdigest(),
        )


class MedusaHeads(nn.Module):
    """At the start every head says again what the lm head says."""

    def __init__(self, hidden: int, count: int, layers: int = 1) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(hidden, hidden))  # U
        self.keep = nn.Parameter(torch.ones(count, hidden))  # a
        self.blocks = nn.Parameter(torch.zeros(layers, count, hidden, hidden))  # W
        self.tree: Tree = chain(1)

    @property
    def count(self) -> int:
        return self.blocks.shape[1]

    @property
    def layers(self) -> int:
        return self.blocks.shape[0]

    def hidden(self, h: Tensor, token: Tensor) -> Tensor:
        """What the lm head reads to guess, [heads, rows, hidden].

        `h` [rows, hidden]: the state that a token was sampled from; `token` [rows, hidden]: that token's row of the
        embedding matrix, without the factor that some families multiply it with.
        """
        h, scale = _normed(h)
        z = h + functional.linear(_normed(token)[0], self.mix)
        x = z * self.keep[:, None] + functional.silu(z @ self.blocks[0].transpose(1, 2))
        for weight in self.blocks[1:]:
            x = x + functional.silu(x @ weight.transpose(1, 2))
        return scale * x

    def best_tokens(self, h: Tensor, tokens: Tensor, decoder: AnyDecoder, ranks: int) -> Tensor:
        """Of every head, the most probable first: [heads, rows, ranks], where `tokens` were chosen from states `h`."""
        ahead = self.hidden(h, decoder.embeddings(tokens))
        logits = decoder.logits(ahead.flatten(0, 1)).view(*ahead.shape[:2], -1)
        return logits.topk(ranks, dim=-1).indices

    def forward(self, h: Tensor, token: Tensor) -> Tensor:
        return self.hidden(h, token)


def _normed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows divided by their root mean square, and that, both in x's dtype."""
    scale = torch.sqrt(x.float().square().mean(-1, keepdim=True) + _EPSILON)
    return (x.float() / scale).to(x.dtype), scale.to(x.dtype)


@dataclass(frozen=True)
class HeadFacts:
    """What `medusa.json` says."""

    target: Target
    heads: int
    layers: int
    tree: Tree
    training: dict[str, Any] = field(default_factory=dict)  # how they were made, for people
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tree": self.tree.to_dict()}


def find_heads(named: str | Path) -> Path:
    """The folder of heads: the bundled ones by their name, or a folder."""
    if str(named) == BUNDLED and not Path(named).exists():
        return bundled_folder(BUNDLED)
    folder = Path(named)
    if not (folder / FACTS).is_file():
        raise StorageError(
            f"no medusa heads in '{named}' ({FACTS} is missing); train some with `quantkit train-medusa`, or use "
            f"{BUNDLED} with the model demo"
        )
    return folder


def save_heads(folder: Path, heads: MedusaHeads, target: Target, training: dict[str, Any]) -> HeadFacts:
    """Writes both files, each whole or not at all; the weights as bfloat16."""
    facts = HeadFacts(target, heads.count, heads.layers, heads.tree, training)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in heads.state_dict().items()
    }
    with storage_errors(folder / WEIGHTS):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS) as partial:
            partial.write_bytes(save(weights))  # `save_file` makes files that only their owner may read
        with replacing(folder / FACTS) as partial:
            partial.write_text(json.dumps(facts.to_dict(), indent=2) + "\n", encoding="utf-8")
    return facts


def load_heads(
    folder: str | Path,
    target: Target,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> MedusaHeads:
    """Heads ready to guess for a model, `Target.of(its checkpoint)`; those of other models are refused."""
    folder = find_heads(folder)
    facts = read_facts(folder)
    _check_target(folder, facts.target, target)
    with torch.device("meta"):
        heads = MedusaHeads(target.hidden_size, facts.heads, facts.layers)
    try:
        weights = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{folder / WEIGHTS} is missing or damaged ({error}); train the heads again") from error
    for name, wanted in heads.state_dict().items():
        found = weights.get(name)
        if found is None or found.shape != wanted.shape:
            given = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise StorageError(
                f"tensor {name} in {folder / WEIGHTS} {given}, but {FACTS} asks for {list(wanted.shape)}; "
                "train the heads again"
            )
        if not bool(torch.isfinite(found).all()):
            raise StorageError(f"tensor {name} in {folder / WEIGHTS} holds NaN or Inf; train the heads again")
    heads.load_state_dict({name: weights[name].to(device, dtype) for name in heads.state_dict()}, assign=True)
    heads.tree = facts.tree
    return heads.requires_grad_(False).eval()


def read_facts(folder: Path) -> HeadFacts:
    """What `medusa.json` says, checked."""
    file = folder / FACTS
    given = read_json(file, "heads need one; train them with `quantkit train-medusa`")
    if given.get("version") != VERSION:
        raise StorageError(f"{file} has version {given.get('version')!r}, but this quantkit reads {VERSION}")
    try:
        target = Target(**given["target"])
        tree = Tree.from_dict(given["tree"])
        facts = HeadFacts(target, given["heads"], given["layers"], tree, given.get("training") or {})
    except InputError as error:
        raise StorageError(f"{file} is damaged: {error}; train the heads again") from error
    except (KeyError, TypeError) as error:
        raise StorageError(f"{file} is damaged ({error}); train the heads again") from error
    if not _within(facts.heads, MOST_HEADS) or not _within(facts.layers, MOST_LAYERS) or tree.depth > facts.heads:
        raise StorageError(
            f"{file} is damaged: {facts.heads!r} heads of {facts.layers!r} layers for a tree {tree.depth} deep; "
            "train the heads again"
        )
    return facts


def _within(value: object, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _check_target(folder: Path, trained: Target, target: Target) -> None:
    """Says the first difference, shapes before weights."""
    for name, value in asdict(trained).items():
        own = asdict(target)[name]
        if value != own:
            what = "other weights (final norm)" if name == "norm_sha256" else f"{name} {value}, this model has {own}"
            raise InputError(
                f"the medusa heads in {folder} belong to another model, with {what}; train heads for this one with "
                "`quantkit train-medusa`"
            )
