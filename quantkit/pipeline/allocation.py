"""Automatic bits: which scheme every stage of layers gets under `target_bits`, so that the model loses least."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.formats import Format, IntegerFormat, Shape
from quantkit.methods.budget import Option, allocate
from quantkit.methods.sensitivity import Sensitivity, candidates
from quantkit.passes.sensitivity import SensitivityPass
from quantkit.progress import Progress, silent
from quantkit.stages import Group

if TYPE_CHECKING:
    from quantkit.pipeline.job import Job

Sizes = Mapping[IntegerFormat, int]  # bits that a stage takes in all, by scheme


@dataclass(frozen=True)
class Allocation:
    """The decision: a format for every layer to quantize, and its record for journal and log."""

    formats: dict[str, Format]
    record: dict[str, Any]


def choose_formats(job: Job, scratch: Path, on_step: Progress = silent) -> Allocation:
    """Measures every stage of layers once, then spends the recipe's `target_bits` where they matter most."""
    assert job.recipe.target_bits is not None
    assert job.tokens is not None
    formats = {module: _integer(fmt) for module, fmt in job.chosen.items()}
    weights = sum(math.prod(job.shapes[module]) for module in formats)
    sizes = _all_sizes(job.family.linear_groups(job.source.config), job.plan, job.shapes)
    work = SensitivityPass(job.source, job.family, formats, job.method, job.device, scratch)
    measured = work.run(job.tokens, job.recipe.target_bits, on_step)
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
        module: replace(_integer(fmt), bits=decided[module]["bits"], group_size=decided[module]["group_size"])
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


def check_target(
    target: float, groups: Iterable[Group], plan: Mapping[str, Format | None], shapes: Mapping[str, Shape]
) -> None:
    """Refuses more or fewer bits than these groups of layers can take."""
    weights = sum(math.prod(shapes[module]) for module, fmt in plan.items() if fmt is not None)
    sizes = _all_sizes(groups, plan, shapes)
    least, most = (sum(pick(size.values()) for size in sizes) / weights for pick in (min, max))
    if not least <= target <= most:
        raise InputError(
            f"target_bits is {target:g}, but the layers of this model take {math.ceil(100 * least) / 100:.2f} to "
            f"{math.floor(100 * most) / 100:.2f} bits a weight, scales and all; choose a number in between"
        )


def _all_sizes(groups: Iterable[Group], plan: Mapping[str, Format | None], shapes: Mapping[str, Shape]) -> list[Sizes]:
    """Of the groups to quantize; the layers of one share their scheme."""
    chosen = [group for group in groups if plan[group[0]] is not None]
    return [_sizes(_integer(plan[group[0]]), [shapes[module] for module in group]) for group in chosen]


def _sizes(fmt: IntegerFormat, shapes: list[Shape]) -> Sizes:
    return {scheme: sum(8 * scheme.nbytes(shape) for shape in shapes) for scheme in candidates(fmt, shapes[0][1])}


def _record(group: Sensitivity, fmt: IntegerFormat) -> dict[str, Any]:
    return {
        "modules": list(group.modules),
        "bits": fmt.bits,
        "group_size": fmt.group_size,
        "kl": group.divergence(fmt),  # predicted from what was measured
        "measured": {"scheme": group.probe.describe(), "kl": group.kl},
    }


def _integer(fmt: Format | None) -> IntegerFormat:
    assert isinstance(fmt, IntegerFormat)  # recipes allow target_bits only there
    return fmt
