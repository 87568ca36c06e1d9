"""A model run block by block: only one decoder block has weights in memory, the others are empty shells.

The arguments that a block gets besides its hidden states (rotary tables, masks) differ between families and between
layers. They are not rebuilt here: the model's own forward runs once with every block replaced by a recorder.

A block runs as its residual parts, attention and MLP, and a part can be stopped where the linears of a stage
(`arch.Stage`) read their inputs, so that calibration can quantize one stage after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.arch import Family
from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.formats.base import DTYPES
from quantkit.host_memory import return_free_memory
from quantkit.served import serve_inputs
from quantkit.skeleton import build_skeleton, modules_by_block
from quantkit.stages import Part, Stage
from quantkit.working_memory import batch_tokens

VOCABULARY_PIECE = 16384  # rows of the output matrix converted at once
POSITIONS = 256  # whose logits are in memory at once


class Recorder(nn.Module):
    """Stands in for a block: remembers what it was called with and passes the hidden states on."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(block, "attention_type", None)  # some families choose the mask by it
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        self.arguments = arguments
        return hidden


class _AllReached(Exception):
    """Stops a part where nothing more is asked of it."""


@dataclass(frozen=True)
class Routed:
    """What the experts of a part are called with."""

    inputs: Tensor  # [tokens, hidden]
    chosen: Tensor  # [tokens, experts of a token]: their numbers


@dataclass(frozen=True)
class BlockPart:
    """A residual part of a block that has its weights."""

    block: nn.Module
    part: Part
    stages: tuple[Stage, ...]  # of this part, in forward order
    arguments: Mapping[str, Any]  # that the body takes besides hidden states

    @property
    def closing(self) -> Stage | None:
        """The stage of one linear whose outputs are the body's; None where the outputs of experts are added up."""
        last = self.stages[-1]
        return None if len(last.names) > 1 or self.routed_stages else last

    @property
    def routed_stages(self) -> tuple[Stage, ...]:
        """Those that have experts; empty where the part has none."""
        return tuple(stage for stage in self.stages if stage.routed)

    def inputs(self, stage: Stage, hidden: Tensor) -> list[Tensor | None]:
        """What the linears of a stage read, for every expert where it has some; None: no token reached the expert."""
        return self.read_by([each.names[0] for each in stage.by_expert], hidden)

    def read_by(self, modules: list[str], hidden: Tensor) -> list[Tensor | None]:
        """What some modules of this part read. It runs until all of them were reached, no further."""
        return self._read_by(modules, lambda: self._body(hidden))

    def route(self, hidden: Tensor) -> Routed:
        """What its experts would be called with. They do not run."""
        called: list[Tensor] = []

        def reached(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            called.extend(arguments)
            raise _AllReached

        with _hooked(self.block.get_submodule(self.routed_stages[0].container), reached), suppress(_AllReached):
            self._body(hidden)
        return Routed(called[0], called[1])

    def expert_reads(self, stage: Stage, inputs: Tensor) -> Tensor:
        """What one expert's linears of a stage (`Stage.by_expert`) read, from what the expert itself reads."""
        expert = self.block.get_submodule(stage.names[0].rpartition(".")[0])
        (found,) = self._read_by([stage.names[0]], lambda: expert(inputs))
        assert found is not None
        return found

    def _read_by(self, modules: list[str], run: Callable[[], object]) -> list[Tensor | None]:
        found: dict[str, Tensor] = {}
        with ExitStack() as hooks, suppress(_AllReached):
            for name in modules:

                def reached(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                    found[name] = inputs[0]
                    if len(found) == len(modules):
                        raise _AllReached

                hooks.enter_context(_hooked(self.block.get_submodule(name), reached))
            run()
        return [found[name] if name in found and found[name].numel() else None for name in modules]

    def run(self, hidden: Tensor) -> Tensor:
        """The hidden states after this part."""
        return self._sum(hidden, self._body(hidden))

    def close(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """The same, from the inputs of the closing stage."""
        assert self.closing is not None
        return self._sum(hidden, self.block.get_submodule(self.closing.names[0])(inputs))

    def _body(self, hidden: Tensor) -> Tensor:
        normed = self.block.get_submodule(self.part.norm)(hidden)
        output = self.block.get_submodule(self.part.body)(normed, **self.arguments)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def _sum(self, hidden: Tensor, output: Tensor) -> Tensor:
        if self.part.post_norm is not None:
            output = self.block.get_submodule(self.part.post_norm)(output)
        return hidden + output


class BlockRunner:
    """The blocks of a checkpoint's model, decoded where it is quantized, materialised one at a time on a device."""

    def __init__(self, checkpoint: Checkpoint, family: Family, device: str = "cpu") -> None:
        self.checkpoint, self.family, self.device = checkpoint, family, torch.device(device)
        # A CPU without 16-bit arithmetic is the rule; a GPU computes as the model will be served.
        self.dtype = torch.float32 if self.device.type == "cpu" else DTYPES[checkpoint.dtype]
        self.config, model = build_skeleton(checkpoint, family, self.dtype)
        self.model: nn.Module = model.get_submodule(family.blocks.rpartition(".")[0])
        blocks = model.get_submodule(family.blocks)
        assert isinstance(blocks, nn.ModuleList)
        self.blocks = blocks
        self._modules = modules_by_block(checkpoint, family.blocks)
        self._precise = set(family.in_float32(checkpoint.config))

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def batch_tokens(self) -> int:
        """Tokens that run through a block at once."""
        return batch_tokens(self.device, eager=self.config._attn_implementation == "eager")

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """The hidden states [..., hidden] before the first block, on the CPU; only rows that are used are read."""
        used, position = tokens.unique(return_inverse=True)
        rows = self._rows(f"{self._outer}.embed_tokens.weight", used).to(self.dtype)
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

    def load(self, layer: int, arguments: Mapping[str, Any]) -> tuple[BlockPart, ...]:
        """One block with its weights, checked for NaN and Inf, as its residual parts."""
        with self.checkpoint.kept_open():
            weights = self._weights(layer)
            block: nn.Module = self.blocks[layer]
            block.load_state_dict(weights, assign=True)
            prefix = f"{self.family.blocks}.{layer}."
            for module in self._modules[layer][1]:
                serve_inputs(block.get_submodule(module.removeprefix(prefix)), self.checkpoint, module)
        return parts_of(block.eval(), self.family.stages(layer, self.checkpoint.config), arguments)

    def _weights(self, layer: int) -> dict[str, Tensor]:
        """Of a block, by their names within it."""
        prefix = f"{self.family.blocks}.{layer}."
        plain, quantized = self._modules[layer]
        weights = {}
        for name in plain:
            tensor = self.checkpoint.tensor(name).to(self.device)
            require_finite(name, tensor)
            weights[name.removeprefix(prefix)] = tensor.to(torch.float32 if name in self._precise else self.dtype)
        for module in quantized:
            decoded = self.checkpoint.weight(module, self.dtype, self.device)
            weights[f"{module.removeprefix(prefix)}.weight"] = decoded
        return weights

    def free(self, layer: int) -> None:
        """Makes a block an empty shell again."""
        self.blocks[layer].to("meta")
        return_free_memory()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [positions, vocabulary] of hidden states [positions, hidden] behind the last block.

        Norm and products are float32 whatever the blocks run in: logits in bfloat16 would add to every KL.
        """
        norm = self.model.get_submodule("norm")
        norm.load_state_dict({"weight": self._outer_tensor("norm.weight")}, assign=True)
        normed = norm(hidden.float())
        logits = torch.cat([normed @ rows.float().T for rows in self._output_rows()], -1)
        cap = self.checkpoint.config.get("final_logit_softcapping", self.family.final_logit_softcapping)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _output_rows(self) -> Iterator[Tensor]:
        """The output matrix in pieces: a GPU keeps it, on the CPU each piece is mapped from its file and let go."""
        if self.device.type != "cpu":
            yield from self._output_matrix.split(VOCABULARY_PIECE)
            return
        for start in range(0, self.checkpoint.tensors[self._output_name].info.shape[0], VOCABULARY_PIECE):
            yield self._rows(self._output_name, slice(start, start + VOCABULARY_PIECE))

    def _rows(self, name: str, index: Tensor | slice) -> Tensor:
        """Of embeddings or output layer, decoded where they are in blocks of their rows."""
        rows, fmt = self.checkpoint.rows(name, index), self.checkpoint.formats.get(name.removesuffix(".weight"))
        return rows if fmt is None else fmt.decode({"weight": rows})

    @cached_property
    def _output_matrix(self) -> Tensor:
        return self._rows(self._output_name, slice(None)).to(self.device)

    @property
    def _output_name(self) -> str:
        tied = self.family.tied(self.checkpoint.config)
        return f"{self._outer}.embed_tokens.weight" if tied else "lm_head.weight"

    def _outer_tensor(self, name: str) -> Tensor:
        return self.checkpoint.tensor(f"{self._outer}.{name}").to(self.device, torch.float32)

    @property
    def _outer(self) -> str:
        return self.family.blocks.rpartition(".")[0]


@contextmanager
def _hooked(module: nn.Module, reached: Callable[[nn.Module, tuple[Tensor, ...]], None]) -> Iterator[None]:
    """Before hooks that round a layer's inputs as an engine does."""
    hook = module.register_forward_pre_hook(reached, prepend=True)
    try:
        yield
    finally:
        hook.remove()


def parts_of(block: nn.Module, stages: tuple[Stage, ...], arguments: Mapping[str, Any]) -> tuple[BlockPart, ...]:
    """The residual parts of a block; `arguments` are for attention."""
    return tuple(
        BlockPart(
            block,
            part,
            tuple(stage for stage in stages if stage.part == part),
            arguments if part.kind == "attention" else {},
        )
        for part in dict.fromkeys(stage.part for stage in stages)
    )


def run_block(parts: tuple[BlockPart, ...], hidden: Tensor) -> Tensor:
    """The hidden states after a block, with gradients where they are enabled."""
    for part in parts:
        hidden = part.run(hidden)
    return hidden


def weight_of(linear: nn.Module) -> Tensor:
    """The weight's values, to be read or changed in place."""
    parameter = linear.weight
    assert isinstance(parameter, nn.Parameter)
    return parameter.data
