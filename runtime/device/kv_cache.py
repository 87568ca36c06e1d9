"""Memory for keys and values: of the model, and of a draft model beside it."""

from __future__ import annotations

import torch

from quantkit.runtime.core.options import KV_DTYPES, EngineOptions
from quantkit.runtime.core.pages import PADDING_PAGE
from quantkit.runtime.device.memory import MemoryPlan
from quantkit.runtime.model.batch import KvCache
from quantkit.runtime.model.config import ModelConfig


def allocate_cache(config: ModelConfig, plan: MemoryPlan, dtype: torch.dtype, options: EngineOptions) -> KvCache:
    """As many pages as the plan has."""
    kept = KV_DTYPES[options.kv_dtype] or dtype
    return _allocate(config, plan.pages, plan.page_size, kept, dtype, options.torch_device)


def allocate_draft_cache(draft: ModelConfig, like: KvCache, dtype: torch.dtype) -> KvCache:
    """As many pages as the target's cache, of the same kind."""
    return _allocate(draft, like.num_pages, like.page_size, like.pages.dtype, dtype, like.pages.device)


def _allocate(
    config: ModelConfig, num_pages: int, page_size: int, kept: torch.dtype, dtype: torch.dtype, device: torch.device
) -> KvCache:
    """Keys and values of a model of this dtype, kept in another where `kept` is one."""
    kinds, heads, width = config.cache_entry
    shape = (config.layers, kinds, num_pages, heads, page_size, width)
    pages = torch.empty(shape, dtype=kept, device=device)
    pages.view(torch.uint8)[:, :, PADDING_PAGE] = 0  # it must hold numbers: padding reads it
    return KvCache(pages, torch.ones(heads, device=device) if kept != dtype else None)
