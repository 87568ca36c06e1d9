"""Experts as linear layers. transformers keeps those of a layer in two tensors, where no hook reaches one of them.

The linears get the names that they have in files, and their weights and biases are views of the tensors: nothing is
copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.arch import Config, Family, Slice
from quantkit.stages import Stage

Linear = tuple[Tensor, Tensor | None]  # weight and bias
Gated = Callable[[Tensor, Tensor], Tensor]  # what becomes of the outputs of gate and up


class _Linear(nn.Linear):
    """One that is given its weight. A model may have 20,000; to initialise them takes longer than to make them."""

    def reset_parameters(self) -> None:
        pass


class Expert(nn.Module):
    """One MLP; `linears` are gate, up and down by their names."""

    def __init__(self, linears: Mapping[str, Linear], gated: Gated) -> None:
        super().__init__()
        self._names, self._gated = tuple(linears), gated
        for name, (weight, bias) in linears.items():
            linear = _Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                linear.bias = nn.Parameter(bias, requires_grad=False)
            self.add_module(name, linear)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self._names)
        result: Tensor = down(self._gated(gate(hidden), up(hidden)))
        return result


class SeparateExperts(nn.Module):
    """In the place of transformers' own, called as they are."""

    def __init__(self, experts: Iterable[Mapping[str, Linear]], gated: Gated) -> None:
        super().__init__()
        for number, linears in enumerate(experts):
            self.add_module(str(number), Expert(linears, gated))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Hidden states [tokens, hidden]; the numbers and weights [tokens, experts of a token] of those chosen."""
        total = torch.zeros_like(hidden)
        experts = list(self.children())
        each, order = chosen.flatten().sort(stable=True)  # the tokens of an expert stand together, in their order
        tokens, shares = order // chosen.shape[1], weights.flatten()[order, None]
        counts = each.bincount(minlength=len(experts)).tolist()  # the only wait for a device
        for expert, own, share in zip(experts, tokens.split(counts), shares.split(counts), strict=True):
            if len(own):
                total.index_add_(0, own, (expert(hidden[own]) * share).to(total.dtype))
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


def fused_weights(weights: Mapping[str, Tensor], family: Family, config: Config) -> dict[str, Tensor]:
    """The experts of all layers in the tensors that transformers keeps them in; the rest as it is."""
    found = dict(weights)
    for layer in range(config["num_hidden_layers"] if family.fused else 0):
        counts = {stage.experts.count for stage in family.stages(layer, config) if stage.experts}
        for fused, ending in itertools.product(family.fused, ("", "_bias") if counts else ()):
            name = f"{family.blocks}.{layer}.{fused.stored}{ending}"
            slices = family.slices(name, *counts)
            found[name] = _stacked([found.pop(part) for part in slices], list(slices.values()))
    return found


def _stacked(parts: list[Tensor], slices: list[Slice]) -> Tensor:
    last = slices[-1]
    rows, *inner = parts[0].shape
    shape = (last.expert + 1, *inner, rows * last.step) if last.transposed else (last.expert + 1, rows * last.step)
    whole = parts[0].new_empty(shape)
    for part, where in zip(parts, slices, strict=True):
        where.take(whole).copy_(part)
    return whole


def _separate(block: nn.Module, family: Family, stages: list[Stage]) -> None:
    linears = [name for stage in stages for name in stage.names]
    folder = module_name(family, linears[0].partition(".{}.")[0])
    parent, _, child = folder.rpartition(".")
    holder = block.get_submodule(parent)
    fused = getattr(holder, child)
    if not hasattr(fused, "gate_up_proj"):  # some families keep linears themselves
        return
    views = _views(fused, family, linears)
    experts = (
        {
            name.partition(".{}.")[2]: (
                views[f"{name.format(number)}.weight"],
                views.get(f"{name.format(number)}.bias"),
            )
            for name in linears
        }
        for number in range(len(fused.down_proj))
    )
    setattr(holder, child, SeparateExperts(experts, partial(_gated, fused, alternating=bool(family.fused))))


def _views(fused: Any, family: Family, linears: list[str]) -> dict[str, Tensor]:
    """Weights and biases of all experts by their names in a block, from transformers' tensors."""
    found: dict[str, Tensor] = {}
    if family.fused:  # as files keep them
        for each, ending in itertools.product(family.fused, ("", "_bias")):
            whole = getattr(fused, each.stored.rpartition(".")[2] + ending).data
            slices = family.slices(f".{each.stored}{ending}", len(whole))
            found |= {name[1:]: where.take(whole) for name, where in slices.items()}
        return found
    for number, (gate_up, down) in enumerate(zip(fused.gate_up_proj.data, fused.down_proj.data, strict=True)):
        weights = zip(linears, (*gate_up.chunk(2), down), strict=True)
        found |= {f"{name.format(number)}.weight": weight for name, weight in weights}
    return found


def _gated(fused: Any, gate: Tensor, up: Tensor, *, alternating: bool) -> Tensor:
    """What transformers makes of the outputs of gate and up."""
    if alternating:
        result: Tensor = fused._apply_gate(torch.stack([gate, up], -1).flatten(-2))
    else:
        result = fused.act_fn(gate) * up
    return result
