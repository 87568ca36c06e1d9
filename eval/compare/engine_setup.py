"""The engine of a comparison: the same for every format, and for the commands that repeat it."""

from __future__ import annotations

from quantkit.eval.compare.asked import SAMPLE_ANSWER, SAMPLE_PROMPT, Asked
from quantkit.eval.plan.source import find_config
from quantkit.runtime.core.options import EngineOptions

ROOMY_CONTEXT = 8192  # tokens


def engine_options(asked: Asked) -> EngineOptions:
    """On a GPU contexts are so long that memory, not their number, limits the cache, and shows what fits."""
    loads = asked.loads
    needed = max(max(load.prompt for load in loads) + asked.new, SAMPLE_PROMPT + SAMPLE_ANSWER)
    most = find_config(asked.model)[1].get("max_position_embeddings") or needed
    return EngineOptions(
        device=asked.device,
        max_context=needed if asked.device == "cpu" else max(needed, min(ROOMY_CONTEXT, most)),
        max_sequences=max(load.batch for load in loads),
    )
