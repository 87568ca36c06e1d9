"""Scales of an FP8 cache, measured on the model as it was quantized: the last unit of the journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.checkpoint import Checkpoint
from quantkit.formats import Format
from quantkit.formats.kv_scheme import summary_of
from quantkit.passes.kv_range import measure_kv_scales
from quantkit.pipeline.job import Job
from quantkit.pipeline.journal import Journal
from quantkit.progress import Progress

RECORD = "kv_scales"  # in the unit's record, and in the log


def scale_cache(job: Job, chosen: Mapping[str, Format], journal: Journal, on_block: Progress) -> None:
    """Runs what the journal holds on the calibration tokens; the journal keeps the scales."""
    assert job.tokens is not None
    assert job.recipe.kv_scales is not None
    steps = len(chosen) + job.recipe.touch_up

    def watch(item: str, total: int) -> None:
        on_block(f"cache of {item}", steps + total)

    model = _finished(job, chosen, journal)
    strategy = job.recipe.kv_scales
    scales = measure_kv_scales(model, job.family, job.tokens, strategy, job.device, journal.folder, watch)
    record = {"layers": [], "promised": {}, "changed": [], RECORD: {"strategy": strategy} | summary_of(scales)}
    journal.commit(scales, record)


def scaled(journal: Journal) -> dict[str, Any] | None:
    """What was found in a run; None where nothing was measured."""
    found: dict[str, Any] | None = journal.record(journal.finished - 1).get(RECORD)
    return found


def _finished(job: Job, chosen: Mapping[str, Format], journal: Journal) -> Checkpoint:
    """The quantized model before it is written: the source's tensors, and those of the journal in their place."""
    replaced = {f"{module}.weight" for module in chosen}
    tensors = {name: stored for name, stored in job.source.tensors.items() if name not in replaced}
    for index in range(journal.finished):
        tensors |= journal.stored(index)
    return job.source.replaced(tensors, chosen)
