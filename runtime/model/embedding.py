"""An embedding that stays in the GGUF blocks of its file; rows are decoded when they are looked up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.formats import Gguf

EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True)
class BlockEmbedding:
    """Stands where a tensor [vocab, hidden] would, as far as others ask one for its shape and dtype."""

    fmt: Gguf
    blocks: Tensor  # uint8 [vocab, bytes of a row]
    dtype: torch.dtype  # of decoded rows

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.fmt.stored_shape({"weight": tuple(self.blocks.shape)}, lambda _: self.blocks))

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def new_empty(self, *shape: int, **options: Any) -> Tensor:
        return torch.empty(shape, **{"dtype": self.dtype, "device": self.blocks.device, **options})

    def look_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [tokens, hidden] of tokens, and the place of each token among them; -1 of one that has no row here."""
        last = len(self.blocks) - 1
        rows = self.fmt.decode({"weight": self.blocks[ids.clamp(0, last)]}, self.dtype)
        places = torch.arange(len(ids), dtype=ids.dtype, device=ids.device)
        return places.masked_fill_((ids < 0) | (ids > last), -1), rows
