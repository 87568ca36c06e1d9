"""quantkit bench"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.bench_batching import batching_command
from quantkit.cli.bench_serve import serve_command
from quantkit.cli.bench_speculative import speculative_command
from quantkit.cli.bench_step import step_command
from quantkit.cli.common import device_option, json_option, print_json, print_table, progress_bar
from quantkit.cli.engine_options import engine_options
from quantkit.errors import InputError, QuantkitError

if TYPE_CHECKING:
    from quantkit.eval.kernels.cases import Case
    from quantkit.eval.kernels.contenders import Contender
    from quantkit.eval.kernels.results import Report
    from quantkit.eval.kernels.timing import Clock

DEFAULT_FORMATS = "w4,nf4,llm-int8,w8a8,fp8"
DEFAULT_SHAPE = "llama-3.1-8b"
_FORMATS = f"Formats, attention, or all; default: {DEFAULT_FORMATS}."
_CACHES = "Of attention: auto (as activations), bf16, fp8, int8, int4."
_SHAPES = f"Models, or layers as OUTxIN; default: {DEFAULT_SHAPE}."
_SHAPE_FORMATS = "Of a shape: formats of `bench kernels`, or recipes; default: w4,nf4,llm-int8,bf16."
_PEERS = "torch, tinygemm, gemlite, bitsandbytes; default: those installed."


@click.group("bench", short_help="Measure speed, beside limits and other packages.")
def command() -> None:
    """Measure speed on this machine.

    \b
    quantkit bench kernels       one kernel at a time
    quantkit bench engine        whole answers: tokens per second, waiting times, memory
    quantkit bench step          one decode step on a GPU: kernels, gaps, the host's share
    quantkit bench batching      static, continuous and paged batches; cold and shared prefixes
    quantkit bench speculative   decoding with guesses, against plain decoding
    quantkit bench serve         a running server, as its clients see it
    """


command.add_command(batching_command)
command.add_command(serve_command)
command.add_command(speculative_command)
command.add_command(step_command)


@command.command("kernels", short_help="Time each kernel, after checking that its result is right.")
@click.option("--format", "formats", multiple=True, metavar="F", help=_FORMATS)
@click.option("--m", "tokens", default="1,16,256", show_default=True, metavar="N", help="Numbers of tokens.")
@click.option("--shape", "shapes", multiple=True, metavar="S", help=_SHAPES)
@click.option("--against", multiple=True, metavar="PEER", help=_PEERS)
@click.option("--dtype", default="bfloat16", show_default=True, help="Dtype of activations: bfloat16 or float16.")
@click.option("--kv-dtype", default="auto", show_default=True, metavar="KIND", help=_CACHES)
@click.option("--repeat", type=click.IntRange(min=1), metavar="N", help="Timings per number; default: 20, on a CPU 5.")
@device_option
@click.option(
    "--tune", is_flag=True, help="First find the fastest kernels for these layers on this GPU, and keep them."
)
@click.option("--explain", is_flag=True, help="Say which kernel was chosen, and why.")
@click.option("--output", type=Path, metavar="FILE", help="CSV to append to; in a checkout: eval/results/kernels.csv.")
@click.option("--no-save", is_flag=True, help="Do not append to a file.")
@json_option
def kernels(
    formats: tuple[str, ...],
    tokens: str,
    shapes: tuple[str, ...],
    against: tuple[str, ...],
    dtype: str,
    kv_dtype: str,
    repeat: int | None,
    device: str,
    tune: bool,
    explain: bool,
    output: Path | None,
    no_save: bool,
    as_json: bool,
) -> None:
    """Time the kernels of each format on the layers of a model. Lists are separated by commas.

    \b
    quantkit bench kernels
    quantkit bench kernels --format w4,nf4 --m 1,8,64 --shape llama-3.2-1b
    quantkit bench kernels --format attention --against torch
    quantkit bench kernels --format attention --kv-dtype bf16,fp8,int8,int4
    quantkit bench kernels --format all --shape 4096x4096 --explain --no-save
    quantkit bench kernels --format w4 --shape qwen2.5-7b --tune

    Every result is compared with float64 first; one that is wrong gets no time, and the exit code is 1. The limit is
    memory bandwidth or matrix rate, whichever binds, measured in the same run. Protocol:
    docs/performance/bench.md.
    """
    from quantkit.devices import resolve_device
    from quantkit.eval.kernels.cases import make_cases
    from quantkit.eval.kernels.peers import choose_peers
    from quantkit.eval.kernels.results import results_path
    from quantkit.eval.kernels.timing import clock_for

    where = resolve_device(device)
    names, models = _split(*formats) or _split(DEFAULT_FORMATS), _split(*shapes) or [DEFAULT_SHAPE]
    cases = make_cases(names, models, _numbers(tokens), dtype, _split(kv_dtype), on_gpu=where != "cpu")
    peers = choose_peers(_split(*against) or None)
    path = results_path(output, not no_save)
    if tune:
        _tune(cases, where)
    report = _measure(cases, dtype, clock_for(where, repeat), peers, path)
    if as_json:
        print_json(report.to_dict())
    else:
        _print(report, explain, path)
    if report.wrong:
        raise QuantkitError(f"{len(report.wrong)} of {len(cases)} results are wrong: {', '.join(report.wrong)}")


def _measure(cases: Sequence[Case], dtype: str, clock: Clock, peers: Sequence[Contender], path: Path | None) -> Report:
    from quantkit.eval.kernels import run
    from quantkit.eval.kernels.results import Measured, ResultsFile

    with progress_bar("kernels") as advance:
        limits = clock.limits(dtype)
        file = ResultsFile(path, clock.describe(), limits) if path else None

        def on_row(row: Measured) -> None:
            if file:
                file.append(row)
            advance(row.case.name, len(cases))

        return run.Bench(clock, peers, run.OURS).run(cases, limits, on_row)


def _tune(cases: Sequence[Case], where: str) -> None:
    import torch

    from quantkit.eval.kernels.tune import tune_cases

    if where == "cpu":
        raise InputError("--tune finds the fastest kernels of a GPU, and there is none here; leave it out")
    tune_cases(cases, torch.device(where), lambda line: click.echo(line, err=True))


def _print(report: Report, explain: bool, path: Path | None) -> None:
    from quantkit.eval.kernels.table import footer, tables

    for title, columns, rows in tables(report, explain=explain):
        print_table(title, columns, rows)
    click.echo(footer(report))
    if path:
        click.echo(f"appended to {path}")


def _split(*texts: str) -> list[str]:
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in _split(text)]
    except ValueError:
        raise InputError(f"--m is '{text}', but must be whole numbers such as 1,16,256") from None


@command.command("engine", short_help="Time whole answers of the engine, many requests together.")
@click.argument("model", required=False)
@click.option("--shape", metavar="S", help=f"A model's shape with random weights; default: {DEFAULT_SHAPE}.")
@click.option("--format", "formats", multiple=True, metavar="F", help=_SHAPE_FORMATS)
@click.option(
    "--batch", default="1,8,32,256", show_default=True, metavar="N", help="Concurrent requests; fit: as many as fit."
)
@click.option("--prompt-len", type=click.IntRange(min=1), help="Default: 128, for 256 requests and more 512.")
@click.option("--new-tokens", default=256, show_default=True, type=click.IntRange(min=2), help="Tokens per answer.")
@click.option("--seed", default=0, show_default=True, help="Seed of the prompts' random tokens.")
@click.option(
    "--outliers",
    metavar="PROFILE",
    help="Of a shape: columns with outliers as LLM.int8 knows them: none, trained, demo or all.",
)
@click.option("--no-tables", is_flag=True, help="Take estimated kernels, as if this GPU had never been measured.")
@click.option(
    "--zero-weights",
    is_flag=True,
    help="Of a shape: zeros as weights, with which a GPU draws less power and is faster.",
)
@click.option("--output", type=Path, metavar="FILE", help="CSV to append to; in a checkout: eval/results/engine.csv.")
@click.option("--no-save", is_flag=True, help="Do not append to a file.")
@engine_options
@json_option
def engine(
    model: str | None,
    shape: str | None,
    formats: tuple[str, ...],
    batch: str,
    prompt_len: int | None,
    new_tokens: int,
    seed: int,
    outliers: str | None,
    no_tables: bool,
    zero_weights: bool,
    output: Path | None,
    no_save: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Time answers of the engine: MODEL is a folder, a hub name or `demo`; or --shape with random weights.

    \b
    quantkit bench engine
    quantkit bench engine --shape llama-3.2-1b --format w4,bf16 --batch 1,64
    quantkit bench engine demo --batch 1,4 --prompt-len 32 --new-tokens 16 --device cpu
    quantkit bench engine --format w4 --speculative draft=shape:llama-3.2-1b:w4,k=4
    quantkit bench engine --format w4 --no-tables
    quantkit bench engine --format fp8 --kv-dtype fp8 --batch fit --prompt-len 500 --new-tokens 2000
    quantkit bench engine --format llm-int8,bf16 --batch 256 --outliers all

    All requests arrive at once, greedy, the end token ignored. Protocol:
    docs/performance/bench.md.
    """
    from quantkit.cli.bench_engine import batches_of, check_shape_name, measure_engines, print_rows, where_rows_go

    if model is not None and shape is not None:
        raise InputError("give a MODEL or a --shape, not both")
    check_shape_name(shape)
    path = where_rows_go(output, not no_save)
    named, sizes = model or shape or DEFAULT_SHAPE, batches_of(batch)
    rows = measure_engines(
        named,
        _split(*formats),
        sizes,
        prompt_len,
        new_tokens,
        options,
        path,
        zeros=zero_weights,
        seed=seed,
        tables=not no_tables,
        outliers=outliers,
    )
    if as_json:
        print_json(
            {"rows": [row.to_dict() | {"stages_s": row.started.stages, "idle": list(row.times.idle)} for row in rows]}
        )
    else:
        print_rows(rows, path)
