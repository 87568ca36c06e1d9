"""Automatic bits: which scheme every stage of layers gets under `target_bits`, so that the model loses least."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.formats import Format, IntegerFormat
from quantkit.methods.budget import Option, allocate
from quantkit.methods.sensitivity import Sensitivity
from quantkit.passes.sensitivity import SensitivityPass
from quantkit.pipeline.job import Job
from quantkit.pipeline.target_bits import Sizes, as_integer, stage_sizes
from quantkit.progress import Progress, silent


@dataclass(frozen=True)
class Allocation:
    """The decision: a format for every layer to quantize, and its record for journal and log."""

    formats: dict[str, Format]
    record: dict[str, Any]


def choose_formats(job: Job, scratch: Path, on_step: Progress = silent) -> Allocation:
    """Measures every stage of layers once, then spends the recipe's `target_bits` where they matter most."""
    assert job.recipe.target_bits is not None
    assert job.tokens is not None
    formats = {module: as_integer(fmt) for module, fmt in job.chosen.items()}
    weights = sum(math.prod(job.shapes[module]) for module in formats)
    sizes = stage_sizes(job.family.linear_groups(job.source.config), job.plan, job.shapes)
    work = SensitivityPass(job.source, job.family, formats, job.method, job.device, scratch)
    measured = work.run(job.tokens, job.recipe.target_bits, on_step, job.start)
    schemes = spend(measured, sizes, math.floor(job.recipe.target_bits * weights))
    record = {
        "target_bits": job.recipe.target_bits,
        "bits_per_weight": sum(size[fmt] for size, fmt in zip(sizes, schemes, strict=True)) / weights,
        "kl": sum(group.divergence(fmt) for group, fmt in zip(measured, schemes, strict=True)),
        "groups": [_record(group, fmt) for group, fmt in zip(measured, schemes, strict=True)],
    }
    return Allocation(formats_from_record(record, job.plan), record)


def formats_from_record(record: Mapping[str, Any], plan: Mapping[str, Format | None]) -> dict[str, Format]:
    """The formats that were decided on, in the order of the plan."""
    decided = {module: group for group in record["groups"] for module in group["modules"]}
    return {
        module: replace(as_integer(fmt), bits=decided[module]["bits"], group_size=decided[module]["group_size"])
        for module, fmt in plan.items()
        if fmt is not None
    }


def spend(measured: list[Sensitivity], sizes: list[Sizes], budget: int) -> list[IntegerFormat]:
    """The scheme of each group with which all together lose least within a budget of bits."""
    schemes = [list(size) for size in sizes]
    options = [
        [Option(size[fmt], group.divergence(fmt)) for fmt in size] for group, size in zip(measured, sizes, strict=True)
    ]
    return [fmts[index] for fmts, index in zip(schemes, allocate(options, budget), strict=True)]


def _record(group: Sensitivity, fmt: IntegerFormat) -> dict[str, Any]:
    return {
        "modules": list(group.modules),
        "bits": fmt.bits,
        "group_size": fmt.group_size,
        "kl": group.divergence(fmt),  # predicted from what was measured
        "measured": {"scheme": group.probe.describe(), "kl": group.kl},
    }
