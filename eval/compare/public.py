"""`quantkit.compare`: every format of a model, measured the same way, and the report about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from quantkit.bundled import HELDOUT_TEXT
from quantkit.calibration_mix import Mix
from quantkit.defaults import DEVICE, QUALITY_WINDOWS, WINDOW
from quantkit.devices import resolve_device
from quantkit.eval.compare.asked import Asked, Entry
from quantkit.eval.compare.results import Comparison, FormatResult
from quantkit.eval.compare.run import check, entries_of
from quantkit.eval.compare.run import compare as measure_formats
from quantkit.eval.report.write import write_report
from quantkit.extras import require

RECIPES = ("llm-int8", "fp8", "nf4", "gptq-w4g128", "awq-w4g128", "gptq-w3g128")
CPU_BATCHES, GPU_BATCHES = (1, 4), (1, 8, 32, 256)
CPU_TOKENS, GPU_TOKENS = (32, 32), (128, 256)  # of prompts and answers


class Watcher(Protocol):
    """Who is told which part of which format begins, and which format is done."""

    def part(self, name: str, doing: str) -> None: ...
    def done(self, found: FormatResult) -> None: ...


class Nobody:
    def part(self, name: str, doing: str) -> None: ...
    def done(self, found: FormatResult) -> None: ...


Watch = Callable[[Asked, Sequence[Entry]], AbstractContextManager[Watcher]]


def _unwatched(asked: Asked, entries: Sequence[Entry]) -> AbstractContextManager[Watcher]:
    return nullcontext(Nobody())


def compare(
    model: str | Path,
    recipes: Sequence[str] = RECIPES,
    output: str | Path = "report",
    *,
    checkpoints: Sequence[str] = (),
    text: str | Path = HELDOUT_TEXT,
    windows: int = 32,
    window: int = WINDOW,
    calibration: str | Mix | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    batches: Sequence[int] | None = None,
    new_tokens: int | None = None,
    reference: bool = True,
    layers: bool = True,
    card_windows: int = QUALITY_WINDOWS,
    device: str = DEVICE,
    seed: int = 0,
    in_one_process: bool = False,
    command: str = "",
    watch: Watch = _unwatched,
) -> Comparison:
    """Quantizes a model by every recipe, measures quality, size and speed of each, and writes `output`/report.html.

    `checkpoints` are folders that exist already. `calibration`, `samples` and `seq_len` hold for all recipes alike;
    `text`, `windows` and `window` are those of quality. `batches` are numbers of concurrent requests. Without
    `reference` quality is measured on quantkit's runtime alone, without `layers` nobody looks for the layers that lose
    most. What `output` has already is not measured again. `in_one_process` is quicker for small models on a CPU.
    """
    require("a report", "report")
    resolved = resolve_device(device)
    on_gpu = resolved != "cpu"
    prompt, new = GPU_TOKENS if on_gpu else CPU_TOKENS
    asked = Asked(
        model=str(model),
        text=str(text),
        windows=windows,
        window=window,
        calibration_text=dict(calibration) if isinstance(calibration, Mapping) else calibration,
        samples=samples,
        seq_len=seq_len,
        batches=tuple(sorted(set(batches or (GPU_BATCHES if on_gpu else CPU_BATCHES)))),
        prompt=prompt,
        new=new_tokens or new,
        device=resolved,
        reference=reference,
        seed=seed,
        card_windows=card_windows,
        layers=layers,
    )
    entries = entries_of(asked, recipes, checkpoints)
    check(asked, entries)
    with watch(asked, entries) as watcher:
        found = measure_formats(
            asked,
            entries,
            Path(output),
            command or "quantkit.compare",
            in_one_process=in_one_process,
            on_part=watcher.part,
            on_format=lambda result, total: watcher.done(result),
        )
    write_report(found, Path(output))
    return found
