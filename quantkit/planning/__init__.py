"""What `quantize` would do, before it does anything: sizes, memory, time, and who will load the result.

`make_plan` reads headers and config.json only. Sizes are exact, but for the few bytes of JSON text that bitsandbytes
keeps in every 4-bit layer (`sizes.py`); memory and time are estimates (`costs.py`). `text.py` puts a plan into words.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from quantkit.arch import Family, family_of
from quantkit.checkpoint import Checkpoint
from quantkit.checkpoint_writer import DEFAULT_SHARD_BYTES
from quantkit.engines import Layers, verdicts
from quantkit.errors import InputError
from quantkit.formats import Format, IntegerFormat, Shape
from quantkit.methods import needs_data
from quantkit.methods.costing import GroupWork
from quantkit.passes.activations import available_memory
from quantkit.planning.costs import Work, estimated_seconds, peak_memory
from quantkit.planning.plan import MethodFacts, ModelFacts, Need, Needs, OutputFacts, QuantizePlan, SchemePlan
from quantkit.planning.sizes import layer_bytes, layer_shapes, schemes_of
from quantkit.planning.text import describe
from quantkit.recipe import Recipe
from quantkit.reference import check_device
from quantkit.stages import Stage
from quantkit.wording import human_bytes, model_name

__all__ = ["QuantizePlan", "describe", "layer_bytes", "make_plan"]


def make_plan(
    source: Checkpoint,
    recipe: Recipe,
    *,
    samples: int,
    seq_len: int,
    device: str,
    output: str | Path | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> QuantizePlan:
    """The plan of a run. Refuses what the run would refuse about model, recipe and device."""
    check_device(device)
    if source.formats:
        raise InputError(f"{source.folder} is quantized already; quantize the original model, or use convert")
    family = family_of(source.config)
    plan = recipe.plan(family, source.config, source.dtype)
    shapes = layer_shapes(source, plan)
    chosen = {module: fmt for module, fmt in plan.items() if fmt is not None}
    kept = tuple(module for module, fmt in plan.items() if fmt is None)
    model = _model_facts(source, family)
    method = _method_facts(recipe, chosen, samples, seq_len)
    written = _output_facts(source, chosen, kept, schemes_of(chosen, shapes, recipe.target_bits), recipe.target_bits)
    work = Work(
        blocks=_groups_by_block(family, source, plan, shapes),
        hidden=int(source.config["hidden_size"]),
        heads=int(source.config["num_attention_heads"]),
        eager=family.attn_logit_softcapping is not None,
        dtype=source.dtype,
        source_bytes=model.bytes,
        output_bytes=written.bytes,
        shard_bytes=shard_bytes,
        method=recipe.method.build(),
        samples=samples if method.calibrated else 0,
        seq_len=seq_len,
        device=device,
    )
    needs = _needs(work, written, output)
    engines = tuple(verdicts(Layers(_mixed(chosen) if recipe.target_bits else chosen, kept)))
    warnings = tuple(_warnings(source, method, chosen, work, needs))
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


def _method_facts(recipe: Recipe, chosen: Mapping[str, Format], samples: int, seq_len: int) -> MethodFacts:
    method = recipe.method.build()
    calibrated = needs_data(method, chosen.values(), recipe.target_bits)
    return MethodFacts(recipe.name, method.name, asdict(method), calibrated, samples, seq_len)


def _output_facts(
    source: Checkpoint,
    chosen: Mapping[str, Format],
    kept: tuple[str, ...],
    schemes: tuple[SchemePlan, ...],
    target_bits: float | None,
) -> OutputFacts:
    quantized = sum(scheme.bytes for scheme in schemes)
    replaced = {f"{module}.weight" for module in chosen}
    plain = sum(stored.nbytes for name, stored in source.tensors.items() if name not in replaced)
    bits = 8 * quantized / sum(scheme.weights for scheme in schemes)
    return OutputFacts(next(iter(chosen.values())).name, schemes, kept, plain + quantized, bits, target_bits)


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


def _needs(work: Work, written: OutputFacts, output: str | Path | None) -> Needs:
    memory = peak_memory(work)
    # Finished blocks stay beside the output until it is complete, with the states that a resumed run goes on from.
    beside = sum(scheme.bytes for scheme in written.schemes) + work.hidden_bytes + memory.scratch
    return Needs(
        device=work.device,
        disk=Need(written.bytes + beside, None if output is None else _free_space(Path(output))),
        ram=Need(memory.ram, available_memory()),
        gpu=None if work.device == "cpu" else Need(memory.gpu, torch.cuda.mem_get_info(work.device)[0]),
        seconds=estimated_seconds(work),
    )


def _free_space(output: Path) -> int:
    folder = output.absolute().parent
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _mixed(chosen: Mapping[str, Format]) -> dict[str, Format]:
    """The layers as engines will meet them where the run finds each one's bits: not all alike."""
    first, fmt = next(iter(chosen.items()))
    assert isinstance(fmt, IntegerFormat)  # recipes allow target_bits only there
    return {**chosen, first: replace(fmt, bits=4 if fmt.bits == 8 else 8)}


def _warnings(
    source: Checkpoint, method: MethodFacts, chosen: Mapping[str, Format], work: Work, needs: Needs
) -> Iterator[str]:
    """What is certain to go wrong or to disappoint."""
    context = int(source.config.get("max_position_embeddings") or method.seq_len)
    widest = max(group.inputs for group in work.quantized)
    if method.calibrated and not 2 <= method.seq_len <= context:
        yield f"sequences of {method.seq_len} tokens do not fit the model and will be refused; choose 2 to {context}"
    if method.calibrated and method.samples < 1:
        yield f"calibration with {method.samples} samples will be refused; choose 1 or more"
    else:
        yield from work.method.warnings(set(chosen.values()), widest, method.samples, method.seq_len)
    for what, need in (("disk space", needs.disk), ("memory", needs.ram), ("GPU memory", needs.gpu)):
        if need is not None and need.is_short:
            missing = human_bytes(need.needed - (need.available or 0))
            yield f"{missing} of {what} are missing"
