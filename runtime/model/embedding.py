"""Embeddings that are not a plain tensor; rows are decoded when they are looked up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.formats import Gguf
from quantkit.kernels.linear.cpu.weight import CpuWeight
from quantkit.kernels.linear.op import LinearWeight

EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True)
class CodedEmbedding(ABC):
    """Stands where a tensor [vocab, hidden] would, as far as others ask one for its shape and dtype."""

    dtype: torch.dtype  # of decoded rows

    @property
    @abstractmethod
    def shape(self) -> torch.Size: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """[tokens, hidden] of tokens that have rows here."""

    def new_empty(self, *shape: int, **options: Any) -> Tensor:
        return torch.empty(shape, **{"dtype": self.dtype, "device": self.device, **options})

    def look_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [tokens, hidden] of tokens, and the place of each token among them; -1 of one that has no row here."""
        last = self.shape[0] - 1
        places = torch.arange(len(ids), dtype=ids.dtype, device=ids.device)
        return places.masked_fill_((ids < 0) | (ids > last), -1), self.rows(ids.clamp(0, last))


@dataclass(frozen=True)
class BlockEmbedding(CodedEmbedding):
    """In the GGUF blocks of its file."""

    fmt: Gguf
    blocks: Tensor  # uint8 [vocab, bytes of a row]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.fmt.stored_shape({"weight": tuple(self.blocks.shape)}, lambda _: self.blocks))

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        return self.fmt.decode({"weight": self.blocks[ids]}, self.dtype)


@dataclass(frozen=True)
class HeadEmbedding(CodedEmbedding):
    """That of a tied output layer in 8 bits, on a CPU: there is one matrix."""

    head: CpuWeight

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.head.outputs, self.head.inputs))

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def nbytes(self) -> int:
        """The output layer counts it."""
        return 0

    def rows(self, ids: Tensor) -> Tensor:
        return self.head.rows(ids)


def embedding_of_head(embedding: Tensor | CodedEmbedding, head: Tensor | LinearWeight) -> Tensor | CodedEmbedding:
    """The embedding of a model whose output layer is tied to it: that layer itself where it can be."""
    if not isinstance(head, CpuWeight) or not head.has_rows or isinstance(embedding, BlockEmbedding):
        return embedding
    return HeadEmbedding(head.dtype, head)
