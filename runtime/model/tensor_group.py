"""What the tensor ranks of one stage say to each other: sums and concatenations of activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Group(Protocol):
    """The tensor ranks of one stage. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in x's dtype. May be written over x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """x [rows, n] of all ranks behind each other: [rows, n * size]. They all have the same n."""
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """The x of one rank, written over x everywhere."""
        ...


@dataclass(frozen=True)
class OneRank:
    """A group of one: nothing is exchanged, nothing is copied."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x


@dataclass(frozen=True)
class TorchGroup:
    """A process group of torch: NCCL between GPUs, where a CUDA graph captures these calls; gloo between CPUs."""

    process_group: dist.ProcessGroup
    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        parts = x.new_empty(self.size * rows, width)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        gather(parts, x.contiguous(), group=self.process_group)
        return parts.view(self.size, rows, width).transpose(0, 1).reshape(rows, self.size * width)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        dist.broadcast(x, group=self.process_group, group_src=source)
        return x
