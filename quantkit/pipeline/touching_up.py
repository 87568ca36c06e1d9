"""The touch-up of a run whose blocks are all in the journal: what it changes is one more unit there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.expert_modules import file_name, module_name
from quantkit.formats import Format, IntegerWeight
from quantkit.formats.base import DTYPES
from quantkit.pipeline.job import Job
from quantkit.pipeline.journal import Journal
from quantkit.pipeline.verification import fingerprint
from quantkit.progress import Progress
from quantkit.reference import load_reference
from quantkit.touch_up import Student, TouchUp

RECORD = "touch_up"  # in the unit's record, and in the log


def touch_up(job: Job, chosen: Mapping[str, Format], journal: Journal, on_step: Progress) -> None:
    """Learns scales and norms of the whole model; the journal keeps them after the blocks."""
    assert job.tokens is not None
    steps = job.recipe.touch_up
    weights, plain = _finished(job, chosen, journal)
    dtype = "float32" if job.device == "cpu" else job.source.dtype
    teacher = load_reference(job.source.folder, dtype, job.device)
    inside = partial(module_name, job.family)
    student = Student(teacher, weights, plain, job.family.blocks, DTYPES[job.source.dtype], inside)

    def watch(step: int, kl: float | None) -> None:
        on_step("touch-up" if kl is None else f"touch-up  KL {kl:.5f}", len(chosen) + steps)

    work = TouchUp(teacher, student, job.tokens.to(job.device))
    found = work.learn(steps, seed=job.data.seed, on_step=watch)
    tensors: dict[str, Tensor] = {}
    promised: dict[str, int] = {}
    for module, weight in student.weights().items():
        parts = chosen[module].pack(weight)
        tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        promised[module] = fingerprint(weight.dequantize())
    norms = {file_name(job.family, name): tensor for name, tensor in student.norms().items()}
    record = {"layers": [], "promised": promised, "changed": sorted(norms), RECORD: asdict(found) | {"steps": steps}}
    journal.commit(tensors | norms, record)


def touched(journal: Journal) -> dict[str, Any] | None:
    """What the touch-up of a run found; None where there was none."""
    return next((record[RECORD] for record in map(journal.record, range(journal.finished)) if RECORD in record), None)


def _finished(
    job: Job, chosen: Mapping[str, Format], journal: Journal
) -> tuple[dict[str, IntegerWeight], dict[str, Tensor]]:
    """The quantized linears, and other tensors that quantization changed; on the device."""
    weights: dict[str, IntegerWeight] = {}
    plain: dict[str, Tensor] = {}
    device = torch.device(job.device)
    for index, modules in enumerate(job.blocks):
        tensors = dict(journal.tensors(index))
        changed = {name: tensors.pop(name) for name in journal.record(index)["changed"]}
        for module in (module for module in modules if module in chosen):
            parts = {name.removeprefix(f"{module}."): tensor.to(device)
                     for name, tensor in tensors.items() if name.startswith(f"{module}.")}  # fmt: skip
            weight = chosen[module].unpack(parts)
            assert isinstance(weight, IntegerWeight)  # `check_touch_up` lets nothing else through
            weights[module] = weight
        plain |= changed
    return weights, plain
