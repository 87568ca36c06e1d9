"""The commands that measure by hand what a comparison measures, for people who want to see it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from quantkit.bundled import HELDOUT_TEXT
from quantkit.eval.compare.asked import Asked, Entry


def commands_of(asked: Asked, entry: Entry) -> tuple[str, ...]:
    """To be run inside the folder of the comparison."""
    return tuple(shlex.join(["quantkit", *words]) for words in _lines(asked, entry))


def _lines(asked: Asked, entry: Entry) -> Iterator[list[str]]:
    sizes = ["--batch", ",".join(map(str, asked.batches)), "--new-tokens", str(asked.new), "--device", asked.device]
    if asked.of_shape:
        yield ["bench", "engine", "--shape", asked.model, *sizes]
        return
    folder = entry.name if entry.kind == "recipe" else entry.source
    if entry.kind == "recipe":
        yield ["quantize", asked.model, "-r", entry.source, "-o", folder, *_calibration(asked)]
    text = [] if asked.text == str(HELDOUT_TEXT) else ["--text", asked.text]
    windows = ["--window", str(asked.window), *_option("--max-windows", asked.windows)]
    base = [] if entry.kind == "baseline" else ["--base", asked.model, *_option("--kl-windows", asked.windows)]
    yield ["eval", folder, "--backend", "runtime", *text, *windows, *base, "--device", asked.device]
    yield ["bench", "engine", folder, *sizes]


def _calibration(asked: Asked) -> list[str]:
    given = {"--text": asked.calibration_text, "--samples": asked.samples, "--seq-len": asked.seq_len}
    given |= {"--seed": asked.seed, "--device": asked.device}
    return [word for name, value in given.items() for word in _option(name, value)]


def _option(name: str, value: object) -> list[str]:
    return [] if value is None else [name, str(value)]
