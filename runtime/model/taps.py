"""Hidden states on the way through the decoder, kept for a drafter that reads them (`drafters/eagle.py`).

The buffer stays where it is, so that CUDA graphs write into it: a row for every token of the batch that ran last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Taps:
    def __init__(self, blocks: Sequence[int], width: int, most: int, dtype: torch.dtype, device: torch.device) -> None:
        """Keeps, of up to `most` tokens, what goes into these blocks, in this order; without any, what the head reads.

        The number behind the last block's stands for what comes out of that block, before the final norm.
        """
        self._columns = {block: slice(at * width, (at + 1) * width) for at, block in enumerate(blocks)}
        self.rows = torch.zeros(most, width * max(len(blocks), 1), dtype=dtype, device=device)

    def take(self, block: int, values: Tensor) -> None:
        columns = self._columns.get(block)
        if columns is not None and len(values) <= len(self.rows):  # longer ones are scored texts, no steps
            self.rows[: len(values), columns].copy_(values)

    def take_last(self, hidden: Tensor) -> None:
        if not self._columns and len(hidden) <= len(self.rows):
            self.rows[: len(hidden)].copy_(hidden)
