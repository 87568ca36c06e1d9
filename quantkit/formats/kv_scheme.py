"""Scales of an FP8 cache of keys and values, as compressed-tensors checkpoints have them and vLLM reads them.

Layout   quantization_config.kv_cache_scheme says how many scales there are: `strategy` is `tensor`, one for a layer's
         keys and one for its values, or `attn_head`, one for each head of them. Beside the weights lie
           ATTENTION.k_scale, ATTENTION.v_scale   floats [1], or [kv_heads, 1, 1]
         where ATTENTION is such as `model.layers.0.self_attn`. Older files spell them ATTENTION.k_proj.output_scale and
         ATTENTION.v_proj.output_scale, and have zero points beside them, which symmetric schemes do not use
Meaning  the cache holds value / scale in float8_e4m3fn. Keys are those after rope, as the cache has them
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

STRATEGIES = ("tensor", "attn_head")
LARGEST = 448.0  # of float8_e4m3fn
_SPELLINGS = (("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale"))
_OF_A_CACHE = re.compile(r"\.self_attn\.[qkv]_(?:proj\.output_)?(?:scale|zero_point)$")


def kv_cache_scheme(strategy: str) -> dict[str, Any]:
    """The entry of quantization_config."""
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": None,
        "zp_dtype": None,
    }


def kv_strategy(config: Mapping[str, Any]) -> str | None:
    """Of a model's config.json; None where there are no scales that an FP8 cache could take."""
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return None
    strategy = scheme.get("strategy") or STRATEGIES[0]
    fits = scheme.get("num_bits") == 8 and scheme.get("type") == "float" and scheme.get("symmetric", True)
    return strategy if fits and not scheme.get("dynamic") and strategy in STRATEGIES else None


def is_of_a_cache(name: str) -> bool:
    """Whether a tensor belongs to a cache, and to no layer."""
    return _OF_A_CACHE.search(name) is not None


def scale_names(attention: str, tensors: Container[str]) -> tuple[str, str]:
    """What the scales of keys and values are called here; where there are none, what they should be called."""
    for names in _SPELLINGS:
        if f"{attention}.{names[0]}" in tensors:
            break
    else:
        names = _SPELLINGS[0]
    return f"{attention}.{names[0]}", f"{attention}.{names[1]}"


def scale_tensors(attention: str, largest: Tensor, strategy: str) -> dict[str, Tensor]:
    """Of one layer, from the largest magnitude of every head, [2, kv_heads] of keys and of values."""
    if strategy == "tensor":
        largest = largest.amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest.float() / LARGEST, 1.0)
    shape = (1,) if strategy == "tensor" else (-1, 1, 1)
    names = _SPELLINGS[0]
    return {f"{attention}.{name}": scale.reshape(shape) for name, scale in zip(names, scales, strict=True)}


def summary_of(scales: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The smallest and the largest scale of keys, and of values."""
    found = {}
    for kind, letter in (("keys", "k"), ("values", "v")):
        own = torch.cat([scale.flatten().float() for name, scale in scales.items() if f".self_attn.{letter}_" in name])
        found[kind] = [float(own.min()), float(own.max())]
    return found


def describe_summary(summary: Mapping[str, Any]) -> str:
    """In words, the strategy too."""
    ranges = (f"{kind} {summary[kind][0]:.4g} to {summary[kind][1]:.4g}" for kind in ("keys", "values"))
    how = "one for a layer" if summary["strategy"] == "tensor" else "one for a head"
    return f"{how} ({summary['strategy']}), {', '.join(ranges)}"
