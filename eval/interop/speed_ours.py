"""Our side of a comparison: what `quantkit bench engine` measures, on a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from quantkit.eval.engine.run import Load, measure
from quantkit.eval.engine.start import start_checkpoint
from quantkit.eval.interop.speed_rows import Timed, longest
from quantkit.runtime.core.options import EngineOptions


def measure_ours(folder: Path, loads: Sequence[Load], device: str) -> Iterator[Timed]:
    """One engine for all loads, with places for the widest and context for the longest."""
    options = EngineOptions(device=device, max_sequences=max(load.batch for load in loads), max_context=longest(loads))
    engine, started = start_checkpoint(str(folder), options, first=True)
    for load in loads:
        yield Timed.offline(load, measure(engine, load, None).seconds, started.process_to_first_token)
