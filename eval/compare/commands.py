"""The commands that measure by hand what a comparison measures, for people who want to see it again.

They are run where the comparison was run, and name every option that decides a number and is not the default.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from quantkit.bundled import HELDOUT_TEXT
from quantkit.calibration_mix import words_of
from quantkit.defaults import QUALITY_WINDOWS
from quantkit.eval.compare.asked import LAYER_WINDOWS, Asked, Entry
from quantkit.eval.compare.engine_setup import engine_options
from quantkit.eval.kernels.cases import UNQUANTIZED


def commands_of(asked: Asked, entry: Entry, output: Path) -> tuple[str, ...]:
    """Of one format of a comparison in the folder `output`."""
    return tuple(shlex.join(["quantkit", *words]) for words in _lines(asked, entry, output))


def _lines(asked: Asked, entry: Entry, output: Path) -> Iterator[list[str]]:
    if asked.of_shape:
        name = UNQUANTIZED if entry.kind == "baseline" else entry.source
        yield from _speed(asked, ["--shape", asked.model, "--format", name])
        return
    folder = str(output / entry.name) if entry.kind == "recipe" else entry.source
    if entry.kind == "recipe":
        yield ["quantize", asked.model, "-r", entry.source, "-o", folder, "--overwrite", *_quantizing(asked)]
    for backend in ("runtime", "reference") if asked.reference else ("runtime",):
        yield ["eval", folder, "--backend", backend, *_quality(asked, entry, asked.windows)]
    if entry.kind != "baseline" and asked.layers:
        yield ["eval", folder, "--layers", *_quality(asked, entry, min(LAYER_WINDOWS, asked.windows))]
    yield from _speed(asked, [folder])


def _quantizing(asked: Asked) -> list[str]:
    texts = [word for text in words_of(asked.calibration_text) for word in ("--text", text)]
    given: dict[str, object] = {"--samples": asked.samples, "--seq-len": asked.seq_len}
    given |= {"--seed": asked.seed, "--device": asked.device}
    card_windows = min(asked.card_windows, asked.windows)
    if card_windows != QUALITY_WINDOWS:
        given["--quality-windows"] = card_windows
    return texts + [word for name, value in given.items() if value is not None for word in (name, str(value))]


def _quality(asked: Asked, entry: Entry, windows: int) -> list[str]:
    text = [] if asked.text == str(HELDOUT_TEXT) else ["--text", asked.text]
    sizes = ["--window", str(asked.window), "--max-windows", str(windows)]
    base = [] if entry.kind == "baseline" else ["--base", asked.model, "--kl-windows", str(windows)]
    return [*text, *sizes, *base, "--seed", str(asked.seed), "--device", asked.device]


def _speed(asked: Asked, what: list[str]) -> Iterator[list[str]]:
    """A line for each length of prompts."""
    options = engine_options(asked)
    engine = ["--max-context", str(options.max_context), "--max-sequences", str(options.max_sequences)]
    engine += ["--seed", str(asked.seed), "--device", asked.device, "--no-save"]
    for prompt, loads in groupby(asked.loads, lambda load: load.prompt):
        batches = ",".join(str(load.batch) for load in loads)
        sizes = ["--batch", batches, "--prompt-len", str(prompt), "--new-tokens", str(asked.new)]
        yield ["bench", "engine", *what, *sizes, *engine]
