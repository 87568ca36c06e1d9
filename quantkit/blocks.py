"""A model run block by block: only one decoder block has weights in memory, the others are empty shells.

The arguments that a block gets besides its hidden states (rotary tables, masks) differ between families and between
layers. They are not rebuilt here: the model's own forward runs once with every block replaced by a recorder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint import Checkpoint, require_finite


class Recorder(nn.Module):
    """Stands in for a block: remembers what it was called with and passes the hidden states on."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(block, "attention_type", None)  # some families choose the mask by it
        self.arguments: dict[str, Any] = {}
        self.hidden = torch.empty(0)

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        self.hidden, self.arguments = hidden, arguments
        return hidden


class BlockRunner:
    """The blocks of a checkpoint's model, materialised one at a time in float32 on the CPU."""

    def __init__(self, checkpoint: Checkpoint, path: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.checkpoint, self.path = checkpoint, path  # such as `model.layers`
        config = AutoConfig.for_model(**checkpoint.config)
        config._attn_implementation = "eager"  # the one kind that every family computes in full
        with torch.device("meta"):
            self.blocks: nn.ModuleList = AutoModelForCausalLM.from_config(config).get_submodule(path)
        small = AutoConfig.for_model(**(checkpoint.config | {"num_hidden_layers": 1, "layer_types": None}))
        small._attn_implementation = "eager"
        self.front = AutoModelForCausalLM.from_config(small, dtype=torch.float32).get_submodule(path.rpartition(".")[0])
        self.front.config = config

    @torch.no_grad()
    def start(self, tokens: Tensor) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """(hidden states of every sequence before the first block, the arguments of every block)."""
        name = f"{self.path.rpartition('.')[0]}.embed_tokens.weight"
        self.front.embed_tokens.weight.data = self.checkpoint.tensor(name).float()
        recorders = [Recorder(block) for block in self.blocks]
        self.front.layers = nn.ModuleList(recorders)
        hidden = []
        for ids in tokens:
            self.front(input_ids=ids[None], use_cache=False)
            hidden.append(recorders[0].hidden)
        return hidden, [recorder.arguments for recorder in recorders]

    def load(self, layer: int) -> nn.Module:
        """One block with its weights, checked for NaN and Inf."""
        prefix = f"{self.path}.{layer}."
        weights: dict[str, Tensor] = {}
        for name in self.checkpoint.tensors:
            if name.startswith(prefix):
                tensor = self.checkpoint.tensor(name)
                require_finite(name, tensor)
                weights[name.removeprefix(prefix)] = tensor.float()
        block: nn.Module = self.blocks[layer]
        block.load_state_dict(weights, assign=True)
        return block.eval()

    def free(self, layer: int) -> None:
        """Makes a block an empty shell again."""
        self.blocks[layer].to("meta")


@torch.no_grad()
def run_block(block: nn.Module, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """The hidden states after a block."""
    output: Tensor | tuple[Tensor, ...] = block(hidden, **arguments)
    return output[0] if isinstance(output, tuple) else output
