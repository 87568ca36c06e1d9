"""Memory for keys and values: of the model, and of a draft model beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.runtime.core.kv_dtypes import KvKind, kv_kind
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.pages import PADDING_PAGE
from quantkit.runtime.device.key_centres import why_uncentred
from quantkit.runtime.device.memory import MemoryPlan
from quantkit.runtime.model.batch import KvCache
from quantkit.runtime.model.config import ModelConfig


def allocate_cache(
    config: ModelConfig, plan: MemoryPlan, dtype: torch.dtype, options: EngineOptions, scales: Tensor | None = None
) -> KvCache:
    """As many pages as the plan has. `scales` are those that a checkpoint brings for FP8, `Weights.kv_scales`."""
    kind = kv_kind(options.kv_dtype, dtype)
    return _allocate(config, plan.pages, plan.page_size, kind, options.torch_device, scales)


def allocate_draft_cache(draft: ModelConfig, like: KvCache, scales: Tensor | None = None) -> KvCache:
    """As many pages as the target's cache, of the same kind."""
    return _allocate(draft, like.num_pages, like.page_size, like.kind, like.pages.device, scales)


def _allocate(
    config: ModelConfig, num_pages: int, page_size: int, kind: KvKind, device: torch.device, scales: Tensor | None
) -> KvCache:
    kinds, heads, width = config.cache_entry
    shape = (config.layers, kinds, num_pages, heads, page_size, kind.entry_width(width))
    pages = torch.empty(shape, dtype=kind.dtype, device=device)
    pages.view(torch.uint8)[:, :, PADDING_PAGE] = 0  # it must hold numbers: padding reads it
    centres = None
    if why_uncentred(config, kind) is None:
        centres = torch.zeros(config.layers, heads, width, device=device)
    if kind.dtype != torch.float8_e4m3fn:
        scales = None
    elif scales is None:
        scales = torch.ones(config.layers, kinds, heads, device=device)
    else:
        scales = scales.clone()  # centres change them
    return KvCache(pages, scales, kind.codes, centres)
