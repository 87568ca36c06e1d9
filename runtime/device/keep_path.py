"""The accepted path of a verified tree moves together.

A tree's tokens lie in the cache in the order of its nodes. Those on the accepted path must stand where plain decoding
would have put them, right behind the old tokens; the next step overwrites what lies behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def keep_path(planes: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copies what single tokens have in all layers of `planes` (`KvCache.planes`), which it changes.

    Each is [layers, 2, pages, kv_heads, page_size, any], any dtype, contiguous but for gaps between pages of a head.
    sources and targets are int64 [n] on its device: KV slots, page * page_size + offset. All sources are read before
    the first target is written, and nothing is read back to the host. A target that is named twice gets one of its
    sources.
    """
    for plane in planes:
        _keep_path(plane, sources, targets)


def _keep_path(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    layers, kinds, count, heads, page_size, width = pages.shape
    raw = pages.view(torch.uint8) if pages.element_size() == 1 else pages  # no float8 for torch to index
    blocks = raw.view(-1, page_size, width)  # pages of a head: torch cuts a copy with large strides into many
    layer = torch.arange(layers * kinds, device=pages.device)[:, None, None]
    head = torch.arange(heads, device=pages.device)

    def places(kv_slots: Tensor) -> tuple[Tensor, Tensor]:
        page, offset = (kv_slots // page_size)[:, None], (kv_slots % page_size)[:, None]
        return (layer * count + page) * heads + head, offset  # [layers * 2, n, kv_heads] and [n, 1]

    blocks[places(targets)] = blocks[places(sources)]
