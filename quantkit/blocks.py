"""A model run block by block: only one decoder block has weights in memory, the others are empty shells.

The arguments that a block gets besides its hidden states (rotary tables, masks) differ between families and between
layers. They are not rebuilt here: the model's own forward runs once with every block replaced by a recorder.

A block is cut into two halves, attention and MLP, and each half where its linears stand, so that calibration can
quantize one group of linears after the other without computing anything twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.arch import Family, Group
from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.formats.base import DTYPES
from quantkit.host_memory import return_free_memory
from quantkit.served import serve_inputs

VOCABULARY_PIECE = 16384  # rows of the output matrix converted at once
BATCH_TOKENS = 4096  # run through a block at once
POSITIONS = 256  # whose logits are in memory at once

# Norms before attention and MLP, and those after them.
_NORMS: dict[str, tuple[tuple[str, str], tuple[str | None, str | None]]] = {
    "pre": (("input_layernorm", "post_attention_layernorm"), (None, None)),
    "sandwich": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}


class Recorder(nn.Module):
    """Stands in for a block: remembers what it was called with and passes the hidden states on."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(block, "attention_type", None)  # some families choose the mask by it
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        self.arguments = arguments
        return hidden


@dataclass(frozen=True)
class Half:
    """Attention or MLP of one block: norm, first linears, what lies between, last linear, residual sum."""

    block: nn.Module
    body: str  # `self_attn` or `mlp`
    norm: str  # before the first linears
    post_norm: str | None  # after the last linear, where the family has one
    first: Group  # the linears that read the normed hidden states
    last: str  # the linear that writes back
    arguments: Mapping[str, Any]

    def inputs(self, hidden: Tensor) -> Tensor:
        """What the first linears read."""
        normed: Tensor = self.block.get_submodule(self.norm)(hidden)
        return normed

    def inner(self, hidden: Tensor) -> Tensor:
        """What the last linear reads."""
        with _passing_through(self.block, self.last):
            output = self.block.get_submodule(self.body)(self.inputs(hidden), **self.arguments)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def close(self, hidden: Tensor, inner: Tensor) -> Tensor:
        """The hidden states after this half."""
        output = self.block.get_submodule(self.last)(inner)
        if self.post_norm is not None:
            output = self.block.get_submodule(self.post_norm)(output)
        result: Tensor = hidden + output
        return result


class BlockRunner:
    """The blocks of a checkpoint's model, decoded where it is quantized, materialised one at a time on a device."""

    def __init__(self, checkpoint: Checkpoint, family: Family, device: str = "cpu") -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.checkpoint, self.family, self.device = checkpoint, family, torch.device(device)
        # A CPU without 16-bit arithmetic is the rule; a GPU computes as the model will be served.
        self.dtype = torch.float32 if self.device.type == "cpu" else DTYPES[checkpoint.dtype]
        plain = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        self.config = AutoConfig.for_model(**plain)
        # Soft caps exist only in the implementation that computes attention in full.
        self.config._attn_implementation = "eager" if family.attn_logit_softcapping else "sdpa"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype)
        self.model: nn.Module = model.get_submodule(family.blocks.rpartition(".")[0])
        self.blocks: nn.ModuleList = model.get_submodule(family.blocks)
        self._modules = _modules_by_block(checkpoint, family.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """The hidden states [..., hidden] before the first block, on the CPU; only rows that are used are read."""
        used, position = tokens.unique(return_inverse=True)
        rows = self.checkpoint.rows(f"{self._outer}.embed_tokens.weight", used).to(self.dtype)
        if self.family.scaled_embedding:  # the factor has the weights' own precision
            factor = torch.tensor(self.config.hidden_size**0.5, dtype=DTYPES[self.checkpoint.dtype])
            rows = rows * factor.to(self.dtype)
        return rows[position]

    @torch.no_grad()
    def arguments(self, length: int) -> list[dict[str, Any]]:
        """What every block gets besides its hidden states, for sequences of this length."""
        model = self.model
        kept = model.layers, model.norm, model.rotary_emb
        recorders = [Recorder(block) for block in self.blocks]
        build: Any = type(model.rotary_emb)
        rotary = build(config=self.config).to(self.device)
        model.layers, model.norm, model.rotary_emb = nn.ModuleList(recorders), nn.Identity(), rotary
        try:
            model(
                inputs_embeds=torch.zeros(1, length, self.config.hidden_size, dtype=self.dtype, device=self.device),
                use_cache=False,
            )
        finally:
            model.layers, model.norm, model.rotary_emb = kept
        return [recorder.arguments for recorder in recorders]

    def load(self, layer: int, arguments: Mapping[str, Any]) -> tuple[Half, Half]:
        """One block with its weights, checked for NaN and Inf, as its two halves."""
        prefix = f"{self.family.blocks}.{layer}."
        weights: dict[str, Tensor] = {}
        plain, quantized = self._modules[layer]
        for name in plain:
            tensor = self.checkpoint.tensor(name).to(self.device)
            require_finite(name, tensor)
            weights[name.removeprefix(prefix)] = tensor.to(self.dtype)
        for module in quantized:
            decoded = self.checkpoint.weight(module, self.dtype, self.device)
            weights[f"{module.removeprefix(prefix)}.weight"] = decoded
        block: nn.Module = self.blocks[layer]
        block.load_state_dict(weights, assign=True)
        for module in quantized:
            serve_inputs(block.get_submodule(module.removeprefix(prefix)), self.checkpoint, module)
        return halves_of(block.eval(), self.family, arguments)

    def free(self, layer: int) -> None:
        """Makes a block an empty shell again."""
        self.blocks[layer].to("meta")
        return_free_memory()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [positions, vocabulary] of hidden states [positions, hidden] behind the last block, in float32."""
        norm = self.model.get_submodule("norm")
        norm.load_state_dict({"weight": self._outer_tensor("norm.weight")}, assign=True)
        normed = norm(hidden)
        logits = torch.cat([normed @ rows.to(self.dtype).T for rows in self._output_rows()], -1).float()
        cap = self.checkpoint.config.get("final_logit_softcapping", self.family.final_logit_softcapping)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _output_rows(self) -> Iterator[Tensor]:
        """The output matrix in pieces: a GPU keeps it, on the CPU each piece is mapped from its file and let go."""
        if self.device.type != "cpu":
            yield from self._output_matrix.split(VOCABULARY_PIECE)
            return
        for start in range(0, self.checkpoint.tensors[self._output_name].info.shape[0], VOCABULARY_PIECE):
            yield self.checkpoint.rows(self._output_name, slice(start, start + VOCABULARY_PIECE))

    @cached_property
    def _output_matrix(self) -> Tensor:
        return self.checkpoint.tensor(self._output_name).to(self.device)

    @property
    def _output_name(self) -> str:
        tied = self.family.tied(self.checkpoint.config)
        return f"{self._outer}.embed_tokens.weight" if tied else "lm_head.weight"

    def _outer_tensor(self, name: str) -> Tensor:
        return self.checkpoint.tensor(f"{self._outer}.{name}").to(self.device, self.dtype)

    @property
    def _outer(self) -> str:
        return self.family.blocks.rpartition(".")[0]


def halves_of(block: nn.Module, family: Family, arguments: Mapping[str, Any]) -> tuple[Half, Half]:
    """The two halves of a block."""
    before, after = _NORMS[family.norm]
    queries, output, gates, down = family.groups
    return (
        Half(block, "self_attn", before[0], after[0], queries, output[0], arguments),
        Half(block, "mlp", before[1], after[1], gates, down[0], {}),
    )


@torch.no_grad()
def run_block(halves: tuple[Half, Half], hidden: Tensor) -> Tensor:
    """The hidden states after a block."""
    for half in halves:
        hidden = half.close(hidden, half.inner(hidden))
    return hidden


@contextmanager
def _passing_through(block: nn.Module, name: str) -> Iterator[None]:
    """For a moment, a linear hands its inputs on as they are."""
    parent, _, child = name.rpartition(".")
    holder = block.get_submodule(parent)
    linear = getattr(holder, child)
    setattr(holder, child, nn.Identity())
    try:
        yield
    finally:
        setattr(holder, child, linear)


def _modules_by_block(checkpoint: Checkpoint, blocks: str) -> list[tuple[list[str], list[str]]]:
    """For every block: its plain tensors, and its quantized modules."""
    count = int(checkpoint.config["num_hidden_layers"])
    found: list[tuple[list[str], list[str]]] = [([], []) for _ in range(count)]
    for kind, names in enumerate((checkpoint.plain_names(), checkpoint.formats)):
        for name in names:
            if name.startswith(f"{blocks}."):
                layer = int(name[len(blocks) + 1 :].partition(".")[0])
                if layer < count:
                    found[layer][kind].append(name)
    return found


def weight_of(linear: nn.Module) -> Tensor:
    """The weight's values, to be read or changed in place."""
    parameter = linear.weight
    assert isinstance(parameter, nn.Parameter)
    return parameter.data
