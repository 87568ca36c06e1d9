"""One run: what the journal does not have yet is quantized, then everything becomes a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.calibration import Calibration
from quantkit.defaults import DEVICE, QUALITY_WINDOWS, SHARD_BYTES
from quantkit.devices import on_device
from quantkit.formats import Format
from quantkit.passes import CalibratedPass, QuantizedBlock, QuantizedLayer, round_blocks
from quantkit.pipeline.allocation import choose_formats, formats_from_record
from quantkit.pipeline.behind import Behind
from quantkit.pipeline.job import Job, prepare
from quantkit.pipeline.journal import Journal
from quantkit.pipeline.kv_scaling import scale_cache
from quantkit.pipeline.report import LayerReport, QuantizeReport
from quantkit.pipeline.touching_up import touch_up
from quantkit.pipeline.verification import fingerprint
from quantkit.pipeline.writing import write_checkpoint
from quantkit.progress import Progress, silent
from quantkit.recipe import Recipe


def quantize(
    model: str | Path,
    recipe: str | Recipe,
    output: str | Path,
    *,
    calibration: Calibration | None = None,
    device: str = DEVICE,
    overwrite: bool = False,
    restart: bool = False,
    shard_bytes: int = SHARD_BYTES,
    quality_windows: int = QUALITY_WINDOWS,
    on_layer: Progress = silent,
) -> QuantizeReport:
    """Quantizes a model (folder, hub name or `demo`) by a recipe (name, file or value) into a new folder.

    Methods that need data take it from `calibration`; by default from the recipe, else from the text that ships with
    quantkit. A run that was killed goes on where it was when it is started with the same arguments; `restart` throws
    its work away. Perplexity and KL divergence are measured on `quality_windows` of held-out text; 0 measures nothing.
    `device` is cpu, cuda, cuda:N or auto: a GPU where there is one.
    """
    job = prepare(
        model,
        recipe,
        output,
        calibration=calibration,
        device=device,
        overwrite=overwrite,
        restart=restart,
        shard_bytes=shard_bytes,
        quality_windows=quality_windows,
    )
    with on_device(job.device), Journal(output, job.arguments(), restart=restart) as journal:
        chosen, allocation, watch = _decide(job, journal, on_layer)
        _run(job, chosen, journal, watch)
        if job.recipe.touch_up and journal.finished == len(job.blocks):
            touch_up(job, chosen, journal, watch)
        if job.recipe.kv_scales is not None and journal.finished == len(job.blocks) + (job.recipe.touch_up > 0):
            scale_cache(job, chosen, journal, watch)
        if job.recipe.writes_gguf:
            from quantkit.pipeline.gguf_file import write_gguf_file  # needs an extra

            report = write_gguf_file(job, chosen, journal)
        else:
            report = write_checkpoint(job, chosen, journal, allocation=allocation)
        journal.discard()
    return report


def _decide(
    job: Job, journal: Journal, on_layer: Progress
) -> tuple[dict[str, Format], dict[str, Any] | None, Progress]:
    """The layers' formats: the recipe's, or where it leaves them open, chosen once; then with the record of why."""
    if job.recipe.target_bits is None:
        return job.chosen, None, on_layer
    steps = 0

    def measuring(item: str, total: int) -> None:
        nonlocal steps
        steps = total
        on_layer(item, total + len(job.chosen))

    record = journal.note("allocation", lambda: choose_formats(job, journal.folder, measuring).record)
    return formats_from_record(record, job.plan), record, lambda item, total: on_layer(item, steps + total)


def _run(job: Job, chosen: Mapping[str, Format], journal: Journal, on_layer: Progress) -> None:
    """Quantizes the blocks that the journal does not have yet."""
    count = len(job.blocks)
    clock = _Clock()

    def advance(layer: QuantizedLayer) -> None:
        clock.lap(layer.module)
        loss = layer.log.get("block_loss", layer.log.get("loss"))
        on_layer(layer.module if loss is None else f"{layer.module}  loss {loss:.5f}", len(chosen))

    for module in (module for block in job.blocks[: journal.finished] for module in block if module in chosen):
        on_layer(module, len(chosen))
    if journal.finished >= count:
        return
    with Behind() as behind:  # a block is written while the next one is worked on
        if job.tokens is None:
            for block in round_blocks(
                job.source, job.family, chosen, job.method, job.device, advance, first=journal.finished
            ):
                behind.do(journal.commit, *_unit(block, clock))
        else:
            _run_calibrated(job, chosen, journal, advance, clock, behind)


def _run_calibrated(
    job: Job,
    chosen: Mapping[str, Format],
    journal: Journal,
    advance: Callable[[QuantizedLayer], None],
    clock: _Clock,
    behind: Behind,
) -> None:
    assert job.tokens is not None
    first, last = journal.finished, len(job.blocks) - 1
    work = CalibratedPass(job.source, job.family, chosen, job.method, job.device, journal.folder)
    if first:
        work.resume(job.tokens, journal.state())
    else:
        work.begin(job.tokens)
    due = _StateDue()
    for index, block in enumerate(work.blocks(advance, first=first), first):
        unit = _unit(block, clock)
        with due as saving:
            if saving and index < last:  # hidden states are large: not beside those of the next block
                behind.wait()
                journal.commit(*unit, state=work.states())
            else:
                behind.do(partial(journal.commit, *unit, can_be_followed=index == last))


def _unit(block: QuantizedBlock, clock: _Clock) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the journal keeps of a block: tensors as the checkpoint will have them, and the record."""
    tensors = dict(block.changed)
    layers, promised = [], {}
    for layer in block.layers:
        parts = layer.fmt.pack(layer.quantized)
        tensors |= {f"{layer.module}.{suffix}": part for suffix, part in parts.items()}
        promised[layer.module] = fingerprint(layer.quantized.dequantize())
        out, inputs = layer.quantized.shape
        size = sum(part.numel() * part.element_size() for part in parts.values())
        log = dict(layer.log) | {"seconds": clock.laps[layer.module]}
        report = LayerReport(layer.module, layer.fmt.describe(), out * inputs, size, layer.relative_error, log)
        layers.append(report.to_dict())
    return tensors, {"layers": layers, "promised": promised, "changed": sorted(block.changed)}


class _Clock:
    """Seconds from one layer to the next."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._last = now, now()
        self.laps: dict[str, float] = {}

    def lap(self, module: str) -> None:
        now = self._now()
        self.laps[module], self._last = round(now - self._last, 3), now


class _StateDue:
    """Whether hidden states should be saved with a block: as long as that takes a second, or a tenth of the time.

    A crash costs the blocks since the last save. Small models save with every block.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._cost, self._saved, self._saving, self._began = now, 0.0, now(), False, 0.0

    def __enter__(self) -> bool:
        self._began = self._now()
        self._saving = self._cost < 1 or self._began - self._saved >= 10 * self._cost
        return self._saving

    def __exit__(self, *_: object) -> None:
        if self._saving:
            self._saved = self._now()
            self._cost = self._saved - self._began
