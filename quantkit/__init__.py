"""quantkit: quantize language models, run them, and measure what was lost.

quantkit.quantize(model, recipe, output)   write a quantized checkpoint
quantkit.load_reference(path)              any supported checkpoint as a transformers model with decoded weights
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.pipeline import quantize
    from quantkit.reference import load_reference

_LAZY = {"quantize": "quantkit.pipeline", "load_reference": "quantkit.reference"}  # so that --help needs no torch
__all__ = ["load_reference", "quantize"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'quantkit' has no attribute '{name}'")
