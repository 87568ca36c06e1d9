"""Memory for keys and values: of the model, and of a draft model beside it."""

from __future__ import annotations

import torch

from quantkit.runtime.core.kv_dtypes import KvKind, kv_kind
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.pages import PADDING_PAGE
from quantkit.runtime.device.memory import MemoryPlan
from quantkit.runtime.model.batch import KvCache
from quantkit.runtime.model.config import ModelConfig


def allocate_cache(config: ModelConfig, plan: MemoryPlan, dtype: torch.dtype, options: EngineOptions) -> KvCache:
    """As many pages as the plan has."""
    kind = kv_kind(options.kv_dtype, dtype)
    return _allocate(config, plan.pages, plan.page_size, kind, options.torch_device)


def allocate_draft_cache(draft: ModelConfig, like: KvCache) -> KvCache:
    """As many pages as the target's cache, of the same kind."""
    return _allocate(draft, like.num_pages, like.page_size, like.kind, like.pages.device)


def _allocate(config: ModelConfig, num_pages: int, page_size: int, kind: KvKind, device: torch.device) -> KvCache:
    kinds, heads, width = config.cache_entry
    shape = (config.layers, kinds, num_pages, heads, page_size, kind.entry_width(width))
    pages = torch.empty(shape, dtype=kind.dtype, device=device)
    pages.view(torch.uint8)[:, :, PADDING_PAGE] = 0  # it must hold numbers: padding reads it
    scaled = kind.dtype == torch.float8_e4m3fn
    return KvCache(pages, torch.ones(heads, device=device) if scaled else None, kind.codes)
