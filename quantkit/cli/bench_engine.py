"""What `quantkit bench engine` does, apart from its options."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.common import print_table, progress_bar
from quantkit.errors import InputError, did_you_mean
from quantkit.wording import human_bytes

if TYPE_CHECKING:
    from quantkit.eval.engine.outliers import OutlierProfile
    from quantkit.eval.engine.results import EngineRow

LONG_PROMPT, LONG_FROM, SHORT_PROMPT = 512, 256, 128  # tokens, for so many requests and more; tokens otherwise
FIT = 0  # as a number of requests: as many as the cache holds
MOST_THAT_FIT = 2048  # unless --max-sequences says otherwise
FULL = 0.9  # of a cache: a row says so
SPARE = 16  # tokens of cache for each request that guesses: drafts are cut short where no page is left


def measure_engines(
    model: str,
    formats: list[str],
    batches: Sequence[int],
    prompt: int | None,
    new: int,
    options: dict[str, Any],
    path: Path | None,
    *,
    zeros: bool = False,
    seed: int = 0,
    tables: bool = True,
    outliers: str | None = None,
) -> list[EngineRow]:
    """A row for every format and batch; without `tables`, kernels are those of a GPU that nobody has measured.
    `outliers` names a profile (`eval/engine/outliers.py`)."""
    from quantkit.eval.engine.outliers import profile_named
    from quantkit.eval.engine.run import Load
    from quantkit.eval.engine.start import CHECKPOINT, formats_of
    from quantkit.kernels.linear.dispatch import hidden_tables
    from quantkit.runtime.core.options import EngineOptions

    long = [size == FIT or size >= LONG_FROM for size in batches]
    loads = [
        Load(size, prompt or (LONG_PROMPT if many else SHORT_PROMPT), new)
        for size, many in zip(batches, long, strict=True)
    ]
    longest = max(load.prompt + load.new for load in loads)
    longest += SPARE if options["speculative"] else 0
    most = options["max_sequences"] or (MOST_THAT_FIT if FIT in batches else max(batches))
    chosen = EngineOptions(**(options | {"max_sequences": most, "max_context": options["max_context"] or longest}))
    names = formats_of(model, formats)
    if zeros and names == [CHECKPOINT]:
        raise InputError(f"--zero-weights is for a --shape; '{model}' has weights of its own")
    profile = None
    if outliers is not None:
        profile = profile_named(outliers)
        if names == [CHECKPOINT] or zeros:
            raise InputError("--outliers is for a --shape with random weights; leave it out")
    rows = []
    with progress_bar("engine") as advance, nullcontext() if tables else hidden_tables():
        how = "" if tables else ", estimated kernels"
        for row in _rows(model, names, loads, chosen, path, zeros, seed, how, profile):
            rows.append(row)
            advance(f"{row.started.format} b{row.times.load.batch}", len(names) * len(loads))
    return rows


def _rows(
    model: str,
    formats: list[str],
    loads: list[Any],
    options: Any,
    path: Path | None,
    zeros: bool,
    seed: int,
    how: str,
    outliers: OutlierProfile | None,
) -> Iterator[EngineRow]:
    import torch

    from quantkit.eval.engine import results
    from quantkit.eval.engine.run import as_many_as_fit, measure, measure_bandwidth
    from quantkit.eval.engine.start import peak_memory, start

    device = options.torch_device
    bandwidth = None
    for place, name in enumerate(formats):
        engine, started = start(model, name, options, first=place == 0, zeros=zeros, outliers=outliers)
        started = replace(started, format=started.format + how)
        if bandwidth is None:
            bandwidth = measure_bandwidth(device)
        for load in loads:
            if load.batch == FIT:
                spare = SPARE if engine.speculation.on else 0
                load = replace(load, batch=as_many_as_fit(engine, load.prompt, load.new + spare))
            row = results.EngineRow(started, measure(engine, load, bandwidth, seed=seed), peak_memory(device))
            if path:
                described = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
                results.append(path, described, row)
            yield row
        del engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def batches_of(text: str) -> list[int]:
    """--batch as numbers; FIT for `fit`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in words if word != "fit" and not (word.isdecimal() and int(word) > 0)]
    if wrong or not words:
        raise InputError(
            f"--batch is '{text}', but must be numbers of 1 or more such as 1,8,256, or fit: as many as the cache holds"
        )
    return [FIT if word == "fit" else int(word) for word in words]


def check_shape_name(shape: str | None) -> None:
    from quantkit.eval.engine.shapes import SHAPES

    if shape is not None and shape not in SHAPES:
        raise InputError(f"unknown shape '{shape}'; {did_you_mean(shape, SHAPES)}")


def where_rows_go(output: Path | None, save: bool) -> Path | None:
    """--output, else the results of the checkout that this is run in, else nowhere."""
    from quantkit.eval.engine.csv_file import results_path
    from quantkit.eval.engine.results import COLUMNS, FILE

    return results_path(output, save, FILE, COLUMNS)


def print_rows(rows: Sequence[EngineRow], path: Path | None) -> None:
    gaps = ("ms/token p50", "p95", "p99")
    guessing = any(row.started.speculative for row in rows)
    outliers = rows[0].started.outliers
    last = ("tokens/step", "guesses right %") if guessing else ("% of limit",)
    columns = ("format", "batch", "prompt + new", "tokens/s", "first token ms", *gaps, *last)
    table = []
    for row in rows:
        cells = row.to_dict()
        share = cells["acceptance"]
        ends = [cells["tokens_per_step"], None if share is None else round(100 * share, 1)]
        ends = ["-" if cell is None else cell for cell in (ends if guessing else [cells["percent_of_limit"]])]
        sizes = f"{cells['prompt']} + {cells['new']}"
        times = [cells[name] for name in ("ttft_ms_median", "gap_ms_p50", "gap_ms_p95", "gap_ms_p99")]
        table.append((cells["format"], cells["batch"], sizes, cells["tokens_per_second"], *times, *ends))
    how = f", {rows[0].started.speculative}" if guessing else ""
    how += "" if outliers is None else f", outliers {outliers}"
    print_table(f"{rows[0].started.model}{how}: output tokens per second", columns, table)
    for started in dict.fromkeys(row.started.format for row in rows):
        row = next(row for row in rows if row.started.format == started)
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.started.stages.items())
        first = row.started.process_to_first_token
        since = "" if first is None else f"; {first:.1f} s from process start to first token"
        memory = f"weights {human_bytes(row.started.weights)}, cache for {row.started.kv_tokens:,} tokens"
        click.echo(f"{started}: {memory}; ready in {row.started.ready:.1f} s ({stages}){since}")
    for row in rows:
        if row.times.held < row.times.load.batch or row.times.cache_used > FULL:
            click.echo(_describe_held(row))
        if row.times.idle:
            click.echo(_describe_idle(row))
    if path:
        click.echo(f"appended to {path}")


def _describe_held(row: EngineRow) -> str:
    load, held = row.times.load, row.times.held
    waited = f", {load.batch - held:,} waited" if held < load.batch else ""
    return (
        f"{row.started.format} batch {load.batch:,}: {held:,} requests of {load.prompt:,} + {load.new:,} tokens held"
        f"{waited}; {row.times.cache_used:.0%} of the cache in use"
    )


def _describe_idle(row: EngineRow) -> str:
    """How long stages waited, beside what a pipeline that fills and drains once would."""
    from quantkit.runtime.parallel.peer_ranks import bubble

    idle = row.times.idle
    each = ", ".join(f"{share:.0%}" for share in idle)
    steps = row.started.micro_batches
    return (
        f"batch {row.times.load.batch}: stages idle {sum(idle) / len(idle):.0%} of the time ({each}); "
        f"{len(idle)} stages and {steps} micro-batches: (p-1)/(m+p-1) = {bubble(len(idle), steps):.0%}"
    )
