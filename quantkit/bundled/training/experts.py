"""A layer of experts for training: all of them compute every token, and the router's weights say what counts.

That takes less time than sorting tokens where a model is this small. The experts are stacked, one parameter for each of
their three matrices; files have one tensor for each expert, under the names that transformers gives them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_OF_AN_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


class Routing(NamedTuple):
    """What the router of one layer says about every token, for each expert."""

    probabilities: Tensor
    weights: Tensor  # of the chosen experts, with a sum of 1; zero for the others


class Stacks(nn.Module):
    """The matrices of all experts, each like the weight of a linear layer."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))


class Experts(nn.Module):
    """Gated feed-forward blocks beside each other, and the router that chooses among them."""

    def __init__(self, experts: int, chosen: int, hidden: int, width: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = Stacks(experts, hidden, width)

    def route(self, x: Tensor) -> Routing:
        probabilities = self.gate(x).float().softmax(dim=-1)
        best, experts = probabilities.topk(self.chosen, dim=-1)
        best = best / best.sum(dim=-1, keepdim=True)
        return Routing(probabilities, torch.zeros_like(probabilities).scatter(-1, experts, best))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """All experts as one wide block, whose channels are weighted expert by expert before they are summed."""
        stacks = self.experts
        inner = F.silu(F.linear(x, stacks.gate_proj.flatten(0, 1))) * F.linear(x, stacks.up_proj.flatten(0, 1))
        inner = inner.unflatten(-1, (weights.shape[-1], -1)) * weights.to(x.dtype).unsqueeze(-1)
        return F.linear(inner.flatten(-2), stacks.down_proj.transpose(0, 1).flatten(1))


def imbalance(routing: Routing) -> Tensor:
    """The loss that keeps all experts at work (that of the Switch Transformer): 1 where they share the tokens equally,
    up to their number where few get all."""
    probabilities, weights = (each.flatten(0, -2) for each in routing)
    picked = (weights > 0).float().mean(0)
    return probabilities.shape[-1] * (picked / picked.sum() * probabilities.mean(0)).sum()


def split_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under the names of files: a stack of experts becomes one tensor for each expert."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim == 3:
            parent, _, matrix = name.rpartition(".")
            found |= {f"{parent}.{expert}.{matrix}.weight": each for expert, each in enumerate(weight)}
        else:
            found[name] = weight
    return found


def stack_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The opposite of `split_experts`."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, weight in weights.items():
        if match := _OF_AN_EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = weight
        else:
            found[name] = weight
    return found | {name: torch.stack([each[expert] for expert in sorted(each)]) for name, each in stacks.items()}
