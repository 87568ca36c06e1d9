"""Experts as linear layers. transformers keeps those of a layer in two tensors, where no hook reaches one of them.

The linears get the names that they have in files, and their weights are views of the tensors: nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantkit.arch import Config, Family
from quantkit.stages import Stage


class Expert(nn.Module):
    """One MLP; `names` are those of gate, up and down."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor, names: tuple[str, str, str], activation: Any) -> None:
        super().__init__()
        self._names, self._activation = names, activation
        for name, weight in zip(names, (gate, up, down), strict=True):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            self.add_module(name, linear)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self._names)
        result: Tensor = down(self._activation(gate(hidden)) * up(hidden))
        return result


class SeparateExperts(nn.Module):
    """In the place of transformers' own, called as they are."""

    def __init__(self, fused: Any, names: tuple[str, str, str]) -> None:
        super().__init__()
        for number, (gate_up, down) in enumerate(zip(fused.gate_up_proj.data, fused.down_proj.data, strict=True)):
            gate, up = gate_up.chunk(2)
            self.add_module(str(number), Expert(gate, up, down, names, fused.act_fn))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Hidden states [tokens, hidden]; the numbers and weights [tokens, experts of a token] of those chosen."""
        total = torch.zeros_like(hidden)
        for number, expert in enumerate(self.children()):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            if len(tokens):
                output = expert(hidden[tokens]) * weights[tokens, place, None]
                total.index_add_(0, tokens, output.to(total.dtype))
        return total


def separate_experts(blocks: nn.ModuleList, family: Family, config: Config) -> None:
    """Puts linears in the place of the experts of transformers' blocks; blocks without experts stay as they are."""
    for layer, block in enumerate(blocks):
        stages = [stage for stage in family.stages(layer, config) if stage.experts is not None]
        if stages:
            _separate(block, family, stages)


def module_name(family: Family, name: str) -> str:
    """What transformers calls something that files call `name`, in a block or in the whole model."""
    for stored, module in family.renamed:
        name = _replaced(name, stored, module)
    return name


def file_name(family: Family, name: str) -> str:
    """The other way."""
    for stored, module in family.renamed:
        name = _replaced(name, module, stored)
    return name


def _replaced(name: str, old: str, new: str) -> str:
    return ".".join(new if part == old else part for part in name.split("."))


def _separate(block: nn.Module, family: Family, stages: list[Stage]) -> None:
    linears = [name for stage in stages for name in stage.names]
    folder = module_name(family, linears[0].partition(".{}.")[0])
    gate, up, down = (name.partition(".{}.")[2] for name in linears)
    parent, _, child = folder.rpartition(".")
    holder = block.get_submodule(parent)
    fused = getattr(holder, child)
    if hasattr(fused, "gate_up_proj"):  # some families keep linears themselves
        setattr(holder, child, SeparateExperts(fused, (gate, up, down)))
