"""What `quantize` would do, before it does anything: sizes, memory, time, and who will load the result.

`make_plan` takes the `Job` that the run itself would start from. Sizes are exact, but for the few bytes of JSON text
that bitsandbytes keeps in every 4-bit layer; memory and time are estimates (`costs.py`). `text.py` puts it into words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from quantkit.arch import Family
from quantkit.calibration_mix import deal
from quantkit.checkpoint import Checkpoint
from quantkit.checkpoint_writer import free_space
from quantkit.engines import Layers, verdicts
from quantkit.formats import Format, IntegerFormat, Shape
from quantkit.methods.costing import GroupWork
from quantkit.methods.sensitivity import SOME_TAKE_2_BITS
from quantkit.passes.activations import available_memory
from quantkit.pipeline.earlier_run import check_journal
from quantkit.pipeline.job import Job
from quantkit.planning.costs import Work, estimated_seconds, peak_memory
from quantkit.planning.plan import MethodFacts, ModelFacts, Need, Needs, OutputFacts, QuantizePlan, SchemePlan
from quantkit.planning.sizes import schemes_of
from quantkit.planning.text import describe
from quantkit.stages import Stage
from quantkit.wording import human_bytes, model_name

__all__ = ["QuantizePlan", "describe", "make_plan"]


def make_plan(job: Job) -> QuantizePlan:
    """The plan of a run that `prepare` let pass; what opening its journal would refuse is refused here."""
    check_journal(job.output, job.arguments(), restart=job.restart)
    source, family, chosen, kept = job.source, job.family, job.chosen, tuple(job.kept)
    target_bits = job.recipe.target_bits
    model, method = _model_facts(source, family), _method_facts(job)
    written = _output_facts(job, schemes_of(chosen, job.shapes, target_bits))
    work = Work(
        blocks=_groups_by_block(family, source, job.plan, job.shapes),
        hidden=int(source.config["hidden_size"]),
        heads=int(source.config["num_attention_heads"]),
        eager=family.attn_logit_softcapping is not None or family.sinks,
        dtype=source.dtype,
        source_bytes=model.bytes,
        output_bytes=written.bytes,
        shard_bytes=job.shard_bytes,
        method=job.method,
        samples=0 if job.tokens is None else job.tokens.shape[0],
        seq_len=job.data.seq_len,
        device=job.device,
        touch_up=job.recipe.touch_up,
        scales_cache=job.recipe.kv_scales is not None,
        measures_bits=target_bits is not None,
    )
    needs = _needs(work, written, Path(job.output))
    layers = Layers(_mixed(chosen, target_bits) if target_bits else chosen, kept, bool(job.family.fused))
    engines = tuple(verdicts(layers))
    warnings = tuple(_warnings(method, chosen, work, needs))
    return QuantizePlan(model, method, written, needs, engines, warnings)


def _model_facts(source: Checkpoint, family: Family) -> ModelFacts:
    return ModelFacts(
        name=model_name(source.folder),
        model_type=family.model_type,
        dtype=source.dtype,
        blocks=int(source.config["num_hidden_layers"]),
        parameters=sum(math.prod(stored.info.shape) for stored in source.tensors.values()),
        bytes=sum(stored.nbytes for stored in source.tensors.values()),
    )


def _method_facts(job: Job) -> MethodFacts:
    method, data = job.method, job.data
    calibrated = job.tokens is not None
    mix = deal(data.source, data.samples) if calibrated and isinstance(data.source, Mapping) else {}
    return MethodFacts(job.recipe.name, method.name, asdict(method), calibrated, data.samples, data.seq_len, mix)


def _output_facts(job: Job, schemes: tuple[SchemePlan, ...]) -> OutputFacts:
    quantized = sum(scheme.bytes for scheme in schemes)
    bits = 8 * quantized / sum(scheme.weights for scheme in schemes)
    name = next(iter(job.chosen.values())).name
    asked = (job.recipe.target_bits, job.recipe.kv_scales)
    return OutputFacts(name, schemes, tuple(job.kept), job.plain_bytes + quantized, bits, *asked)


def _groups_by_block(
    family: Family, source: Checkpoint, plan: Mapping[str, Format | None], shapes: Mapping[str, Shape]
) -> tuple[tuple[GroupWork, ...], ...]:
    """The stages of every block as sizes; all experts of a stage are alike."""
    return tuple(
        tuple(_group_work(family, layer, stage, plan, shapes) for stage in family.stages(layer, source.config))
        for layer in range(int(source.config["num_hidden_layers"]))
    )


def _group_work(
    family: Family, layer: int, stage: Stage, plan: Mapping[str, Format | None], shapes: Mapping[str, Shape]
) -> GroupWork:
    group = family.modules(layer, stage.by_expert[0])  # layers of a stage share their scheme
    work = GroupWork(shapes[group[0]][1], tuple(shapes[module][0] for module in group), plan[group[0]])
    if stage.experts is None:
        return work
    return replace(work, experts=stage.experts.count, per_token=stage.experts.per_token)


def _needs(work: Work, written: OutputFacts, output: Path) -> Needs:
    memory = peak_memory(work)
    # Finished blocks stay beside the output until it is complete, with the states that a resumed run goes on from.
    beside = sum(scheme.bytes for scheme in written.schemes) + work.hidden_bytes + memory.scratch
    return Needs(
        device=work.device,
        disk=Need(written.bytes + beside, free_space(output)),
        ram=Need(memory.ram, available_memory()),
        gpu=None if work.device == "cpu" else Need(memory.gpu, torch.cuda.mem_get_info(work.device)[0]),
        seconds=estimated_seconds(work),
    )


def _mixed(chosen: Mapping[str, Format], target_bits: float) -> dict[str, Format]:
    """The layers as engines will meet them where the run finds each one's bits: not all alike.

    Which bits there will be nobody knows yet; below an average of 4, scales and all, some take fewer.
    """
    first, fmt = next(iter(chosen.items()))
    assert isinstance(fmt, IntegerFormat)  # recipes allow target_bits only there
    other = (2 if target_bits < SOME_TAKE_2_BITS else 3) if target_bits < 4 else 8
    return {**dict.fromkeys(chosen, replace(fmt, bits=4)), first: replace(fmt, bits=other)}


def _warnings(method: MethodFacts, chosen: Mapping[str, Format], work: Work, needs: Needs) -> Iterator[str]:
    """What is certain to disappoint."""
    widest = max(group.inputs for group in work.quantized)
    yield from work.method.warnings(set(chosen.values()), widest, method.samples, method.seq_len)
    for what, need in (("disk space", needs.disk), ("memory", needs.ram), ("GPU memory", needs.gpu)):
        if need is not None and need.is_short:
            missing = human_bytes(need.needed - (need.available or 0))
            yield f"{missing} of {what} are missing"
