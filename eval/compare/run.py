"""A whole comparison: check what was asked, measure every format in its own process, put the results together."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import quantkit
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.eval.compare.asked import Asked, Entry
from quantkit.eval.compare.commands import commands_of
from quantkit.eval.compare.forecast import START
from quantkit.eval.compare.machine import describe_machine
from quantkit.eval.compare.parts import parts_of
from quantkit.eval.compare.results import Comparison, FormatResult
from quantkit.eval.compare.shape import entry_format
from quantkit.eval.compare.store import Store, store_of
from quantkit.eval.compare.worker import Job, work
from quantkit.eval.plan.model import read_model
from quantkit.eval.plan.source import find_config
from quantkit.eval.quality.predictors import Predictor
from quantkit.eval.quality.windows import check_source, read_windows
from quantkit.eval.shapes import SHAPES
from quantkit.provenance import Provenance, provenance_of
from quantkit.recipe import load_recipe
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder
from quantkit.wording import model_name

OnPart = Callable[[str, str], None]  # name of the format, what is being done
OnFormat = Callable[[FormatResult, int], None]  # a finished one, and how many there are
CPU_NOTE = "All speeds are those of a CPU; they say nothing about a GPU."
SHAPE_NOTE = "The weights are random numbers of the model's shape: speed and memory are measured, quality is not."


def entries_of(asked: Asked, recipes: Sequence[str], checkpoints: Sequence[str]) -> list[Entry]:
    """The unquantized model, then recipes, then checkpoints; refuses names that would get in each other's way."""
    if asked.model in SHAPES and not asked.of_shape:
        raise InputError(f"the engine does not run the shape '{asked.model}'; `quantkit plan` does the arithmetic")
    dtype = "bfloat16" if asked.of_shape else Checkpoint(model_folder(asked.model)).dtype
    entries = [Entry(dtype, "baseline", asked.model)]
    entries += [Entry(load_recipe(recipe).name, "recipe", recipe) for recipe in recipes]
    entries += [Entry(Path(folder).resolve().name, "checkpoint", folder) for folder in checkpoints]
    names = [entry.name for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two formats are called '{twice}'; give each once, or rename the folder")
    return entries


def check(asked: Asked, entries: Sequence[Entry]) -> None:
    """Everything that can be known to be wrong before minutes are spent."""
    if not asked.batches or min(asked.batches) < 1 or asked.prompt < 1 or asked.new < 2:
        raise InputError("batches and prompt must be 1 or more, new tokens 2 or more")
    if asked.of_shape:
        if any(entry.kind == "checkpoint" for entry in entries):
            raise InputError("a shape has random weights, which no checkpoint compares with; leave --checkpoint out")
        for entry in entries:
            entry_format(asked.model, entry)
        return
    base = Checkpoint(model_folder(asked.model))
    if base.formats:
        raise InputError(f"'{asked.model}' is quantized already; the comparison needs the original as its baseline")
    check_source(asked.text)
    tokenizer = load_tokenizer(asked.model)
    windows = read_windows(tokenizer, asked.text, window=asked.window, max_windows=asked.windows)
    sample = tokenizer.decode(windows.ids[0])
    for entry in entries:
        if entry.kind == "recipe":
            load_recipe(entry.source)
        if entry.kind == "checkpoint":
            other = load_tokenizer(entry.source)
            if other(sample)["input_ids"] != tokenizer(sample)["input_ids"]:
                raise InputError(
                    f"'{entry.source}' has another tokenizer than '{asked.model}', so their predictions do not "
                    "compare; give checkpoints that were made from this model"
                )


def compare(
    asked: Asked,
    entries: Sequence[Entry],
    output: Path,
    command: str,
    *,
    in_one_process: bool = False,
    on_part: OnPart = lambda name, part: None,
    on_format: OnFormat = lambda found, total: None,
) -> Comparison:
    """Measures what is missing in `output` and gives everything. Call `check` first.

    `in_one_process`: all formats in this process, which computes the unquantized model once and starts at once; for
    small models on a CPU.
    """
    machine = describe_machine(asked.device)
    output.mkdir(parents=True, exist_ok=True)
    results = []
    run = _runner_here() if in_one_process else _run_process
    for entry in entries:
        store = store_of(output, asked, entry, machine.device)
        found = _measured(asked, entry, store, output, on_part, run)
        commands, provenance = commands_of(asked, entry, output), _provenance(asked, entry, output)
        results.append(replace(found, commands=commands, provenance=provenance))
        on_format(results[-1], len(entries))
    name, config = find_config(asked.model)
    model = read_model(name, config)
    notes = [*([CPU_NOTE] if not machine.gpu else []), *([SHAPE_NOTE] if asked.of_shape else [])]
    return Comparison(
        model=name if asked.of_shape else model_name(asked.model),
        family=model.model_type,
        parameters=model.decoder.parameters if model.decoder else 0,
        machine=machine,
        date=datetime.date.today().isoformat(),
        command=command,
        seed=asked.seed,
        formats=tuple(results),
        notes=tuple(notes),
    )


def _provenance(asked: Asked, entry: Entry, output: Path) -> Provenance | None:
    """Read from the folders, so that results of earlier runs have it too."""
    folder = str(output / entry.name) if entry.kind == "recipe" else entry.source
    if asked.of_shape or (entry.kind == "recipe" and not Path(folder).is_dir()):
        return None
    return provenance_of(folder, asked.model)


def _measured(
    asked: Asked, entry: Entry, store: Store, output: Path, on_part: OnPart, run: Callable[[Job, OnPart], str]
) -> FormatResult:
    """From disk where it is complete; else it is run."""
    known = store.read()
    if known is not None and known.error is None and all(part.done(known) for part in parts_of(asked, entry)):
        return known
    on_part(entry.name, START)
    ended = run(Job(asked, entry, str(output), store.key, str(store.file)), on_part)
    found = store.read() or FormatResult(entry.name, "", entry.kind == "baseline")
    if ended and found.error is None:
        found = replace(found, error=ended)
        store.write(found)
    return found


def _runner_here() -> Callable[[Job, OnPart], str]:
    bases: dict[str, Predictor] = {}

    def run(job: Job, on_part: OnPart) -> str:
        work(job, lambda item, total: on_part(job.entry.name, item), bases)
        return ""

    return run


def _run_process(job: Job, on_part: OnPart) -> str:
    """Why the process ended, where it did not end well."""
    file = Path(job.file).with_suffix(".job")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(job.to_dict()), encoding="utf-8")
    command = [sys.executable, "-m", "quantkit.eval.compare.worker", str(file)]
    log = Path(job.file).with_suffix(".stderr")
    with log.open("w", encoding="utf-8") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment()) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    with contextlib.suppress(ValueError, TypeError):  # a library that prints
                        item, _ = json.loads(line)
                        on_part(job.entry.name, str(item))
            except BaseException:  # Ctrl-C: what is measured stays
                process.kill()
                raise
        code = process.returncode
    file.unlink()
    if code == 0:
        log.unlink()
        return ""
    if code < 0:
        hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
        return f"the process was ended by signal {signal.Signals(-code).name}{hint}"
    return f"the process failed with exit code {code}: {_last_line(log)}"


def _environment() -> dict[str, str]:
    """The package must be found where it was found here, also where it is not installed."""
    here = str(Path(quantkit.__file__).parent.parent)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
