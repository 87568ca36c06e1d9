"""Rotary settings of a model as GGUF keeps them: keys of the metadata, and tables of divisors as tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.arch import Family
from quantkit.errors import InputError
from quantkit.gguf_import.rope import ROPE_FREQS, llama3_divisors

_KNOWN = ("default", "linear", "yarn", "llama3", "longrope")


def rope_keys(family: Family, config: Mapping[str, Any], head: int) -> dict[str, Any]:
    """Keys behind the name of the architecture; `config` is filled, so that `rope_parameters` is there."""
    rope = _parameters(config)
    kind = rope.get("rope_type", "default")
    if kind not in _KNOWN or (kind == "llama3" and family.model_type not in ("llama", "mistral")):
        raise InputError(f"rope scaling '{kind}' of a {family.model_type} model cannot be written as GGUF")
    keys: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"]), "rope.dimension_count": _turned(rope, head)}
    if (local := config["rope_parameters"].get("sliding_attention")) is not None:
        keys["rope.freq_base_swa"] = float(local["rope_theta"])
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        keys |= _yarn_keys(rope)
    if kind in ("yarn", "llama3", "longrope"):
        keys["rope.scaling.original_context_length"] = _original(rope, config)
    if kind == "longrope":
        original = _original(rope, config)
        keys["rope.scaling.attn_factor"] = _longrope_factor(
            rope, config["max_position_embeddings"] / original, original
        )
    return keys


def rope_tables(config: Mapping[str, Any], head: int) -> dict[str, Tensor]:
    """Tensors [turned dimensions / 2] that divide the frequencies, by their names in the file."""
    rope = _parameters(config)
    turned = _turned(rope, head)
    if rope.get("rope_type") == "llama3":
        wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, turned, 2, dtype=np.float64) / turned)
        numbers = (rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"])
        divisors = llama3_divisors(wavelengths, *numbers, rope["original_max_position_embeddings"])
        return {ROPE_FREQS: torch.from_numpy(divisors).float()}
    if rope.get("rope_type") != "longrope":
        return {}
    tables = {f"rope_factors_{length}.weight": rope[f"{length}_factor"] for length in ("long", "short")}
    for name, factors in tables.items():
        if len(factors) != turned // 2:
            raise InputError(f"{name} would have {len(factors)} numbers, but {turned} dimensions of a head are turned")
    return {name: torch.tensor(factors, dtype=torch.float32) for name, factors in tables.items()}


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the layers that see all tokens."""
    rope: dict[str, Any] = config["rope_parameters"]
    full: dict[str, Any] = rope.get("full_attention", rope)
    return full


def _turned(rope: Mapping[str, Any], head: int) -> int:
    return int(head * rope.get("partial_rotary_factor", 1.0))


def _yarn_keys(rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise InputError("yarn with mscale cannot be written as GGUF for this family")
    keys: dict[str, Any] = {}
    if (attention := rope.get("attention_factor")) is not None:  # llama.cpp multiplies what is usual by this
        keys["rope.scaling.attn_factor"] = attention / (0.1 * math.log(rope["factor"]) + 1.0)
    for name in ("beta_fast", "beta_slow"):
        if rope.get(name) is not None:
            keys[f"rope.scaling.yarn_{name}"] = float(rope[name])
    return keys


def _original(rope: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    given = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return int(given or config["max_position_embeddings"])


def _longrope_factor(rope: Mapping[str, Any], stretch: float, original: int) -> float:
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    return math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
