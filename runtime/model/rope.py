"""Tables of cosines and sines for every position.

Frequencies of the common kinds, default and llama3, are computed here, because importing transformers takes seconds of
a start; those of all others come from transformers' own formulas. The settings are read here for the same reason, from
config.json in its old and new spelling. Kinds that look at the length of a text (longrope, dynamic) are set for the
longest context that the engine serves: an answer must not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quantkit.arch import Config
from quantkit.errors import InputError, did_you_mean
from quantkit.runtime.model.config import ModelConfig

_GLOBAL_THETA = 1_000_000.0  # of full layers among sliding ones, where config.json is silent
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class RopeTable:
    """cos and sin, float32 [positions, rotary_dim / 2]."""

    cos: Tensor
    sin: Tensor


def rope_tables(raw: Config, config: ModelConfig, positions: int, device: torch.device) -> list[RopeTable]:
    """The table of every layer; layers that turn alike share one."""
    tables: dict[str, RopeTable] = {}
    chosen = []
    for window in config.windows:
        by_type = config.family.rope == "per-layer-type"
        kind = _SLIDING if by_type and window is not None else _FULL
        if kind not in tables:
            tables[kind] = _table(rope_settings(raw, config, kind), config, positions, device)
        chosen.append(tables[kind])
    return chosen


def rope_settings(raw: Config, config: ModelConfig, kind: str = _FULL) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and what the type needs, for layers of one kind."""
    given = dict(raw.get("rope_parameters") or config.family.rope_defaults)
    scaling = dict(raw.get("rope_scaling") or {})
    theta: float = raw.get("rope_theta", config.family.rope_theta)
    if config.family.rope == "per-layer-type":
        given = dict(given.get(kind) or {})
        theta = raw.get("rope_theta", _GLOBAL_THETA)
        if kind == _SLIDING:
            theta, scaling = raw.get("rope_local_base_freq", config.family.rope_theta), {}
    settings: dict[str, Any] = {"rope_theta": theta, **(scaling or given)}
    settings.setdefault("rope_type", settings.get("type", "default"))
    settings.setdefault("partial_rotary_factor", raw.get("partial_rotary_factor", config.family.partial_rotary_factor))
    if settings["rope_type"] in config.family.longrope_aliases:
        settings["rope_type"] = "longrope"
    if settings["rope_type"] in ("llama3", "yarn", "longrope"):
        original = raw.get("original_max_position_embeddings")
        settings["original_max_position_embeddings"] = original or settings.get(
            "original_max_position_embeddings", config.max_positions
        )
    return settings


def _table(settings: dict[str, Any], config: ModelConfig, positions: int, device: torch.device) -> RopeTable:
    frequencies, factor = _frequencies(settings, config, positions)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return RopeTable((angles.cos() * factor).to(device), (angles.sin() * factor).to(device))


def _frequencies(settings: dict[str, Any], config: ModelConfig, positions: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, and the factor of cos and sin."""
    kind = settings["rope_type"]
    try:
        if kind == "default":
            return _plain_frequencies(settings, config), 1.0
        if kind == "llama3":
            return _llama3_frequencies(settings, config), 1.0
        return _frequencies_of_transformers(kind, settings, config, positions)
    except (KeyError, TypeError) as error:
        raise InputError(f"config.json: rope settings of type '{kind}' are incomplete: {error}") from error


def _plain_frequencies(settings: dict[str, Any], config: ModelConfig) -> Tensor:
    rotated = int(config.head_dim * settings["partial_rotary_factor"])
    theta: float = settings["rope_theta"]
    return 1.0 / (theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))


def _llama3_frequencies(settings: dict[str, Any], config: ModelConfig) -> Tensor:
    """Pairs that turn often within the original context stay, those that hardly turn are slowed, others in between."""
    plain = _plain_frequencies(settings, config)
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    if not low < high:
        raise InputError(f"config.json: rope's low_freq_factor {low} must be below its high_freq_factor {high}")
    turns = plain * settings["original_max_position_embeddings"] / (2 * math.pi)
    return torch.lerp(plain / settings["factor"], plain, ((turns - low) / (high - low)).clamp(0, 1))


def _frequencies_of_transformers(
    kind: str, settings: dict[str, Any], config: ModelConfig, positions: int
) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        known = did_you_mean(str(kind), ("default", *ROPE_INIT_FUNCTIONS))
        raise InputError(f"config.json: rope_type '{kind}' is not supported; {known}")
    as_config = SimpleNamespace(
        rope_parameters=settings,
        standardize_rope_params=lambda: None,
        head_dim=config.head_dim,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        max_position_embeddings=config.max_positions,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](as_config, torch.device("cpu"), seq_len=positions)
    return frequencies.float(), float(factor)
