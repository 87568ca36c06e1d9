"""Rounding a weight to GGUF blocks: scales are searched for the least weighted error, codes follow from them.

The error of a weight counts as much as its input column matters: importance [in], the mean square of what the column
was fed in calibration; without it all columns count alike. Of a type with small scales, first every group gets the
scale (and minimum) of its own that suits it best, then the block's scale is chosen so that small whole numbers come
near to those, and last the small numbers, the block's scale and the codes are refitted in turns.

    symmetric.py   scale alone: Q4_0, Q5_0, Q8_0, Q3_K, Q6_K, and tables: IQ4_NL, IQ4_XS
    shifted.py     scale and minimum: Q4_1, Q5_1, Q2_K, Q4_K, Q5_K

Rows do not depend on each other; they are worked on in pieces, so memory holds a few copies of a piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats.gguf.blocks import Blocks
from quantkit.formats.gguf.shifted import search_shifted
from quantkit.formats.gguf.symmetric import search_symmetric
from quantkit.formats.gguf.types import BlockType

PIECE = 1 << 18  # weights worked on at once: small enough for the caches of a CPU, large enough for a GPU's threads
_LEAST = 1e-6  # importance of a column that calibration never fed, relative to the mean


def search_blocks(weight: Tensor, kind: BlockType, importance: Tensor | None = None) -> Blocks:
    """What the blocks of a weight [out, in] hold, each field [out, in / block, ...]. `importance` [in], at least 0."""
    out, inputs = weight.shape
    columns = _columns(inputs, weight.device, importance).view(-1, kind.size)  # [blocks, size]
    rows = max(1, PIECE * (64 if weight.is_cuda else 1) // inputs)
    search = search_shifted if kind.has_mins else search_symmetric
    pieces = []
    for start in range(0, out, rows):
        piece = weight[start : start + rows].float().unflatten(1, (-1, kind.size))  # [rows, blocks, size]
        pieces.append(search(piece, columns, kind))
    return Blocks(
        torch.cat([piece.codes for piece in pieces]),
        torch.cat([piece.scale for piece in pieces]),
        *(_joined([getattr(piece, name) for piece in pieces]) for name in ("minimum", "scales", "mins")),
    )


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None


def _columns(inputs: int, device: torch.device, importance: Tensor | None) -> Tensor:
    if importance is None:
        return torch.ones(inputs, device=device)
    mean = importance.float().mean()
    return (importance.float() / mean).clamp(min=_LEAST) if bool(mean > 0) else torch.ones(inputs, device=device)
