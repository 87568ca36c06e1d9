"""Scales that a checkpoint brings for an FP8 cache, as the cache of one rank takes them."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.errors import StorageError
from quantkit.formats.kv_scheme import kv_strategy, scale_names
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.ranks import Ranks

_log = logging.getLogger("quantkit.runtime")


def read_kv_scales(
    checkpoint: Checkpoint,
    config: ModelConfig,
    device: torch.device,
    ranks: Ranks = Ranks(),  # noqa: B008  (a value)
) -> Tensor | None:
    """float32 [layers, 2, kv_heads] of this rank, of keys and of values; None where there are none. `config` is the
    whole model's."""
    if config.latent is not None:
        return None
    if kv_strategy(checkpoint.config) is None:
        if (checkpoint.config.get("quantization_config") or {}).get("kv_cache_scheme"):
            _log.warning("the kv_cache_scheme of this checkpoint has no scales for a cache in FP8; they are 1")
        return None
    layers = [
        torch.stack([_scales(checkpoint, name, config.kv_heads) for name in _names(checkpoint, config, layer)])
        for layer in ranks.blocks(config.layers)
    ]
    return torch.stack(layers)[:, :, ranks.kv_heads(config.kv_heads)].to(device).contiguous()


def _names(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> tuple[str, str]:
    attention = f"{config.family.blocks}.{layer}.{config.stages[layer][0].part.body}"
    return scale_names(attention, checkpoint.tensors)


def _scales(checkpoint: Checkpoint, name: str, kv_heads: int) -> Tensor:
    """Of every head; one scale counts for all of them."""
    stored = checkpoint.tensor(name)
    if stored.numel() not in (1, kv_heads) or not stored.is_floating_point():
        raise StorageError(
            f"tensor {name} in {checkpoint.folder} is {str(stored.dtype)[6:]} {list(stored.shape)}, but scales of a "
            f"cache are one float for a layer, or one for each of its {kv_heads} KV heads; leave --kv-dtype fp8 out"
        )
    scales = stored.flatten().float()
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise StorageError(
            f"tensor {name} in {checkpoint.folder} holds scales that are not positive numbers; leave --kv-dtype fp8 out"
        )
    return scales.expand(kv_heads)
