"""What both kernels of attention on a CPU are compiled for, and what they are given."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quantkit.kernels.cpu.language import Code, Value
from quantkit.kernels.cpu.rows import load_argument, load_integers


class Kind(NamedTuple):
    """What kernels are compiled for."""

    dtype: torch.dtype
    kept: torch.dtype  # of the caches
    head_dim: int
    sinks: bool


class Held(NamedTuple):
    """The arguments inside the kernel."""

    q: Value
    keys: Value
    values: Value
    table: Value
    table_stride: Value
    contexts: Value
    starts: Value
    sequences: Value
    out: Value
    heads: Value
    kv_heads: Value
    page_size: Value
    window: Value
    sinks: Value

    @classmethod
    def read(cls, code: Code, arguments: Value) -> tuple[Held, Value, Value, Value]:
        """And the scale of scores; of blocks their tokens, and how many pieces of work there are."""
        *held, tokens, pieces = load_integers(code, arguments, len(cls._fields) + 2)
        return cls(*held), load_argument(code, arguments, len(cls._fields) + 2), tokens, pieces
