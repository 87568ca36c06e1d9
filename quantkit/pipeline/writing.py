"""From the finished blocks of a run to a checkpoint: written, read back, compared, measured, and only then named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from quantkit.arch import family_of
from quantkit.bundled import HELDOUT_TEXT
from quantkit.checkpoint import Checkpoint
from quantkit.checkpoint_writer import CheckpointWriter
from quantkit.engines import Layers, verdicts
from quantkit.errors import QuantkitError
from quantkit.formats import Format, dialect_of
from quantkit.formats.kv_scheme import kv_cache_scheme
from quantkit.pipeline.job import Job
from quantkit.pipeline.journal import Journal
from quantkit.pipeline.kv_scaling import scaled
from quantkit.pipeline.model_card import CardFacts, license_of, model_card
from quantkit.pipeline.quality import Quality, compare_by_blocks
from quantkit.pipeline.report import LayerReport, QuantizeReport
from quantkit.pipeline.touching_up import touched
from quantkit.pipeline.verification import verify_written
from quantkit.provenance import QUANTIZATION_LOG, origin_of

LM_HEAD = "lm_head"  # stays as it is: half the readers cannot load a quantized one


def write_checkpoint(
    job: Job,
    chosen: Mapping[str, Format],
    journal: Journal,
    *,
    allocation: Mapping[str, Any] | None = None,
) -> QuantizeReport:
    """Writes what the journal and the source say. The same journal gives the same bytes."""
    records = [journal.record(index) for index in range(journal.finished)]
    layers = tuple(LayerReport(**layer) for record in records for layer in record["layers"])
    promised = {module: value for record in records for module, value in record["promised"].items()}
    changed = {name for record in records for name in record["changed"]}
    with CheckpointWriter(
        job.output,
        overwrite=job.overwrite,
        shard_bytes=job.shard_bytes,
        expected_bytes=job.plain_bytes + job.quantized_bytes(chosen),
        when_full=journal.when_full,
    ) as writer:
        _add_plain(job.source, {f"{module}.weight" for module in chosen} | changed, writer)
        newest = {name: index for index in range(journal.finished) for name in journal.checksums(index)}
        for index in range(journal.finished):
            checksums = journal.checksums(index)
            for name, tensor in journal.tensors(index):
                if newest[name] == index:  # a touch-up replaces what blocks had
                    writer.add(name, tensor, checksums[name])
        write_config(writer, job.source, chosen, [LM_HEAD, *job.kept], job.recipe.kv_scales)
        source_bytes = sum(stored.nbytes for stored in job.source.tensors.values())
        name = next(iter(chosen.values())).name
        report = None

        def check(folder: Path) -> None:
            nonlocal report
            verify_written(folder, promised, job.device)
            quality = measured_quality(job, folder)
            sizes = (source_bytes, writer.total_bytes)
            facts = QuantizeReport(str(job.output), job.recipe.name, name, *sizes, job.calibration, quality, layers)
            report = replace(facts, touch_up=touched(journal), kv_scales=scaled(journal))
            writer.add_text(QUANTIZATION_LOG, _log(job, report, allocation))
            writer.add_text("README.md", _card(job, report, chosen))

        writer.finish(check)
    assert report is not None
    return report


def write_config(
    writer: CheckpointWriter,
    source: Checkpoint,
    modules: Mapping[str, Format],
    kept: list[str],
    kv_scales: str | None = None,
) -> None:
    """config.json with its quantization_config, what older readers look for beside it, and the source's small files."""
    dialect = dialect_of(modules)
    gates = family_of(source.config).gates(source.config) if dialect.lists_gates else []
    config = dialect.write(modules, [*kept, *gates])
    if kv_scales is not None:
        config["kv_cache_scheme"] = kv_cache_scheme(kv_scales)
    writer.add_json("config.json", source.config | {"quantization_config": config})
    for file in source.side_files():
        writer.add_file(file)
    for name, value in dialect.side_files(config).items():
        writer.add_json(name, value)


def _add_plain(source: Checkpoint, replaced: set[str], writer: CheckpointWriter) -> None:
    """Everything that stays as it is."""
    for name in source.tensors:
        if name not in replaced:
            writer.add(name, source.tensor(name))


def measured_quality(job: Job, folder: Path) -> Quality | None:
    """What was lost; a checkpoint that computes NaN is not finished."""
    if job.quality is None:
        return None
    written = Checkpoint(folder)
    found = compare_by_blocks(job.source, written, job.family, job.quality, HELDOUT_TEXT, job.device, job.start)
    if not found.perplexity < float("inf") and found.base_perplexity < float("inf"):
        raise QuantkitError("the quantized model computes NaN or Inf on held-out text; nothing was kept")
    return found


def _log(job: Job, report: QuantizeReport, allocation: Mapping[str, Any] | None) -> str:
    """One JSON object a line: what was asked and what was lost, then what became of each layer."""
    first: dict[str, Any] = {
        "recipe": job.recipe.to_dict(),
        "device": job.device,
        "calibration": report.calibration,
        "origin": asdict(origin_of(job.source.folder)),
        "quality": report.quality.to_dict() if report.quality else None,
        "bits_per_weight": report.bits_per_weight,
        "warnings": report.warnings,
        "experts": report.experts and report.experts.describe(),
    }
    if allocation is not None:
        first["allocation"] = allocation
    if report.touch_up is not None:
        first["touch_up"] = report.touch_up
    if report.kv_scales is not None:
        first["kv_scales"] = report.kv_scales
    return "".join(json.dumps(line) + "\n" for line in (first, *(layer.to_dict() for layer in report.layers)))


def _card(job: Job, report: QuantizeReport, chosen: Mapping[str, Format]) -> str:
    return model_card(
        CardFacts(
            model=job.model,
            recipe=job.recipe,
            format=report.format,
            source_bytes=report.source_bytes,
            bytes=report.bytes,
            layers=report.layers,
            kept=job.kept,
            engines=verdicts(Layers(chosen, tuple(job.kept), bool(job.family.fused))),
            calibration=report.calibration,
            quality=report.quality,
            license=license_of(job.source.folder),
            kv_scales=report.kv_scales,
        )
    )
