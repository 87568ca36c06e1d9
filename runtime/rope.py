"""Tables of cosines and sines for every position: transformers' own, so that every kind of scaling is covered.

Kinds that look at the length of a text (longrope, dynamic) are set for the longest context that the engine serves:
an answer must not depend on what else is in the batch.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.arch import Config
from quantkit.errors import InputError
from quantkit.runtime.model_config import ModelConfig

_TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class RopeTable:
    """cos and sin, float32 [positions, rotary_dim / 2]."""

    cos: Tensor
    sin: Tensor


def rope_tables(raw: Config, config: ModelConfig, positions: int, device: torch.device) -> list[RopeTable]:
    """The table of every layer; layers that turn alike share one."""
    rotary = _transformers_rotary(raw, config)
    takes_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    tables: dict[str | None, RopeTable] = {}
    chosen = []
    for window in config.windows:
        kind = ("full_attention" if window is None else "sliding_attention") if takes_kind else None
        if kind not in tables:
            tables[kind] = _table(rotary, kind, positions, device)
        chosen.append(tables[kind])
    return chosen


def _transformers_rotary(raw: Config, config: ModelConfig) -> Any:
    import transformers

    plain = {key: value for key, value in raw.items() if key != "quantization_config"}
    architecture = config.family.architecture
    module = sys.modules[getattr(transformers, architecture).__module__]
    rotary = getattr(module, architecture.removesuffix("ForCausalLM") + "RotaryEmbedding")
    try:
        return rotary(transformers.AutoConfig.for_model(**plain))
    except (KeyError, ValueError) as error:
        raise InputError(f"config.json: rope settings are not understood: {error}") from error


def _table(rotary: Any, kind: str | None, positions: int, device: torch.device) -> RopeTable:
    """The last position comes first: kinds that look at the length then settle for the longest."""
    like = torch.zeros(1)
    extra = () if kind is None else (kind,)
    rotary(like, torch.tensor([[positions - 1]]), *extra)
    cos, sin = [], []
    for start in range(0, positions, _TOKENS_AT_ONCE):
        at = torch.arange(start, min(start + _TOKENS_AT_ONCE, positions))[None]
        settled = torch.cat([at, torch.full((1, 1), positions - 1)], 1)  # a shorter text would be turned otherwise
        part_cos, part_sin = (part[0, :-1, : part.shape[-1] // 2] for part in rotary(like, settled, *extra))
        cos.append(part_cos)
        sin.append(part_sin)
    return RopeTable(torch.cat(cos).contiguous().to(device), torch.cat(sin).contiguous().to(device))
