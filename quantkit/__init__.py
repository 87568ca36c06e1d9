"""quantkit: quantize language models, run them, and measure what was lost.

quantkit.quantize(model, recipe, output)   write a quantized checkpoint; quantkit.Calibration says from which text
quantkit.evaluate(model, base)             perplexity, KL divergence and agreement, with intervals
quantkit.compare(model, recipes, output)   every format of a model: quality, speed, memory, and a report
quantkit.load_reference(path)              any supported checkpoint as a transformers model with decoded weights
quantkit.LLM(path).generate(prompts)       answers of the engine, on a GPU or a CPU; quantkit.SamplingParams says how
quantkit.AsyncLLM(path)                    the same for an event loop: many requests at once, streamed
quantkit.detect_watermark(text, key)       whether an answer has the quantkit.Watermark of this key
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quantkit.threads import wait_asleep

if TYPE_CHECKING:
    from quantkit.calibration import Calibration
    from quantkit.eval.compare.public import compare
    from quantkit.eval.quality.evaluate import evaluate
    from quantkit.pipeline import quantize
    from quantkit.reference import load_reference
    from quantkit.runtime.core.sampling_params import SamplingParams
    from quantkit.runtime.core.watermark import Watermark
    from quantkit.runtime.llm import LLM
    from quantkit.runtime.sampling.structured_output import GuideSpec
    from quantkit.runtime.server.async_llm import AsyncLLM
    from quantkit.runtime.watermark_detector import detect_watermark

_LAZY = {  # so that --help needs no torch
    "AsyncLLM": "quantkit.runtime.server.async_llm",
    "Calibration": "quantkit.calibration",
    "GuideSpec": "quantkit.runtime.sampling.structured_output",
    "LLM": "quantkit.runtime.llm",
    "SamplingParams": "quantkit.runtime.core.sampling_params",
    "Watermark": "quantkit.runtime.core.watermark",
    "compare": "quantkit.eval.compare.public",
    "detect_watermark": "quantkit.runtime.watermark_detector",
    "evaluate": "quantkit.eval.quality.evaluate",
    "load_reference": "quantkit.reference",
    "quantize": "quantkit.pipeline",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "Calibration",
    "GuideSpec",
    "SamplingParams",
    "Watermark",
    "compare",
    "detect_watermark",
    "evaluate",
    "load_reference",
    "quantize",
]

wait_asleep(os.environ)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'quantkit' has no attribute '{name}'")
