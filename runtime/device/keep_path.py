"""The accepted path of a verified tree moves together.

A tree's tokens lie in the cache in the order of its nodes. Those on the accepted path must stand where plain decoding
would have put them, right behind the old tokens; the next step overwrites what lies behind them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keep_path(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies keys and values of single tokens in all layers of `pages`, which it changes.

    pages [layers, 2, pages, kv_heads, page_size, head_dim], contiguous, any dtype. sources and targets are int64 [n] on
    its device: KV slots, page * page_size + offset. All sources are read before the first target is written, and
    nothing is read back to the host. A target that is named twice gets one of its sources.
    """
    layers, kinds, count, heads, page_size, head_dim = pages.shape
    raw = pages.view(torch.uint8) if pages.element_size() == 1 else pages  # no float8 for torch to index
    rows = raw.view(-1, head_dim)  # of one head each, and one index: torch cuts a copy with large strides into many
    layer = torch.arange(layers * kinds, device=pages.device)[:, None, None]
    head = torch.arange(heads, device=pages.device)

    def heads_of(kv_slots: Tensor) -> Tensor:
        page, offset = (kv_slots // page_size)[:, None], (kv_slots % page_size)[:, None]
        return ((layer * count + page) * heads + head) * page_size + offset  # [layers * 2, n, kv_heads]

    rows[heads_of(targets)] = rows[heads_of(sources)]
