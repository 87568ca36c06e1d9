"""What `--kv-dtype auto` means for a start: the dtype of activations where what was asked for fits, else 8 bits.

Asked for are `kv_tokens`; else `max_context` tokens for each of `max_sequences`, where both are given; else those of
one sequence of `max_context`. Who gives none of them gets the dtype of activations, and contexts as long as memory
allows. Decided from the headers of files and the memory that is free, before weights are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quantkit.kernels.card import Card, card_of, runs_kernels
from quantkit.runtime.core.kv_dtypes import kv_kind
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.card_plan import small_kv_dtype
from quantkit.runtime.device.memory import room_for_cache
from quantkit.runtime.model.config import ModelConfig
from quantkit.wording import human_bytes


@dataclass(frozen=True)
class RankNeed:
    """What a rank holds beside its cache."""

    config: ModelConfig  # of this rank
    weights: int  # bytes, a draft's too
    draft: ModelConfig | None = None


@dataclass(frozen=True)
class KvChoice:
    """The kind of cache, and why."""

    kv_dtype: str  # of EngineOptions
    reason: str
    is_smaller: bool = False  # than what a start with room would have

    def line(self, dtype: torch.dtype) -> str:
        """For a log."""
        return f"KV cache in {kv_kind(self.kv_dtype, dtype).label}: {self.reason}"

    def settled(self, options: EngineOptions) -> EngineOptions:
        return options if self.kv_dtype == options.kv_dtype else replace(options, kv_dtype=self.kv_dtype)


def choose_kv_dtype(
    ranks: Sequence[RankNeed], dtype: torch.dtype, options: EngineOptions, available: int
) -> KvChoice:  # fmt: skip
    """`ranks` are all that load at once, each with so many bytes of its own."""
    if options.kv_dtype != "auto":
        return KvChoice(options.kv_dtype, "asked for")
    what, tokens = _asked(options)
    full = kv_kind("auto", dtype).label
    rooms = [room_for_cache(one.config, one.weights, dtype, options, available, one.draft) for one in ranks]
    short = next((room for room in rooms if room.tokens < tokens), None)
    if short is None:
        return KvChoice("auto", f"{what} fit" if what else f"{full} unless --max-context asks for more than fits")
    small = small_kv_dtype(_card(options), ranks[0].config.cache_entry)
    if small is None:
        return KvChoice("auto", f"{what or 'few tokens'} do not fit, but this model has no smaller cache here")
    needed, left = human_bytes(short.bytes_of(tokens)), human_bytes(short.bytes)
    return KvChoice(small, f"{what or 'few tokens'} need {needed} in {full}, and {left} are left", is_smaller=True)


def _asked(options: EngineOptions) -> tuple[str, int]:
    """In words, and as a number."""
    if options.kv_tokens is not None:
        return f"{options.kv_tokens:,} tokens", options.kv_tokens
    if options.max_context is None:
        return "", options.page_size
    if options.max_sequences is None or options.max_sequences == 1:
        return f"{options.max_context:,} tokens", options.max_context
    rounded = -(-options.max_context // options.page_size) * options.page_size
    return f"{options.max_sequences:,} x {options.max_context:,} tokens", options.max_sequences * rounded


def _card(options: EngineOptions) -> Card | None:
    return card_of(options.torch_device) if runs_kernels(options.torch_device) else None
