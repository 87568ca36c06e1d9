"""quantkit: quantize language models, run them, and measure what was lost.

quantkit.quantize(model, recipe, output)   write a quantized checkpoint
quantkit.load_reference(path)              any supported checkpoint as a transformers model with decoded weights
quantkit.LLM(path).generate(prompts)       answers of the engine, on a GPU or a CPU; quantkit.SamplingParams says how
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.pipeline import quantize
    from quantkit.reference import load_reference
    from quantkit.runtime.core.sampling_params import SamplingParams
    from quantkit.runtime.llm import LLM

_LAZY = {  # so that --help needs no torch
    "LLM": "quantkit.runtime.llm",
    "SamplingParams": "quantkit.runtime.core.sampling_params",
    "load_reference": "quantkit.reference",
    "quantize": "quantkit.pipeline",
}
__all__ = ["LLM", "SamplingParams", "load_reference", "quantize"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'quantkit' has no attribute '{name}'")
