"""quantkit bench step"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.bench_engine import check_shape_name
from quantkit.cli.common import json_option, print_json, print_table
from quantkit.cli.engine_options import engine_options
from quantkit.errors import InputError
from quantkit.wording import human_bytes

if TYPE_CHECKING:
    from quantkit.eval.engine.step_results import StepResult

_SHAPE, _FORMAT = "llama-3.1-8b", "w4"
_COUNT = click.IntRange(min=1)


@click.command("step", short_help="Say where the time of one decode step goes on a GPU.")
@click.argument("model", required=False)
@click.option("--shape", metavar="S", help=f"A model's shape with random weights; default: {_SHAPE}.")
@click.option("--format", "format_name", metavar="F", help=f"Of a shape; default: {_FORMAT}.")
@click.option("--batch", default=1, show_default=True, type=_COUNT, metavar="N", help="Concurrent requests.")
@click.option(
    "--context", default=256, show_default=True, type=_COUNT, metavar="N", help="Tokens of each request, about."
)
@click.option("--steps", default=20, show_default=True, type=_COUNT, metavar="N", help="Steps under the profiler.")
@click.option("--output", type=Path, metavar="FILE", help="CSV to append to; in a checkout: eval/results/step.csv.")
@click.option("--no-save", is_flag=True, help="Do not append to a file.")
@engine_options
@json_option
def step_command(
    model: str | None,
    shape: str | None,
    format_name: str | None,
    batch: int,
    context: int,
    steps: int,
    output: Path | None,
    no_save: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Say where the time of a decode step goes: MODEL is a folder, a hub name or `demo`; or --shape.

    \b
    quantkit bench step
    quantkit bench step --shape llama-3.2-1b --format nf4 --batch 32 --context 1024
    quantkit bench step demo --batch 4 --no-save
    quantkit bench step --format bf16 --steps 50 --json

    Steps run under torch's profiler, and every microsecond is counted once: for a kernel, for a gap between kernels, or
    for the time between steps, in which the device waits for the host. The limit is reading weights and contexts once,
    at the bandwidth measured in the same run. Protocol: docs/performance/bench.md.
    """
    from quantkit.eval.engine.csv_file import results_path
    from quantkit.eval.engine.step_results import COLUMNS, FILE

    if model is not None and shape is not None:
        raise InputError("give a MODEL or a --shape, not both")
    check_shape_name(shape)
    path = results_path(output, not no_save, FILE, COLUMNS)
    result = _measure(model or shape or _SHAPE, format_name, batch, context, steps, options, path)
    if as_json:
        print_json(result.to_dict())
    else:
        print_result(result, path)


def _measure(
    model: str,
    format_name: str | None,
    batch: int,
    context: int,
    steps: int,
    options: dict[str, Any],
    path: Path | None,
) -> StepResult:
    import torch

    from quantkit.eval.engine.run import measure_bandwidth
    from quantkit.eval.engine.shapes import SHAPES
    from quantkit.eval.engine.start import formats_of, start
    from quantkit.eval.engine.step_results import append
    from quantkit.eval.engine.step_run import check_options, measure_step, tokens_of
    from quantkit.runtime.core.options import EngineOptions

    asked = format_name or (_FORMAT if model in SHAPES else None)
    (name,) = formats_of(model, [asked] if asked else [])
    chosen = EngineOptions(**(options | {"max_sequences": options["max_sequences"] or batch}))
    check_options(chosen)
    longest = sum(tokens_of(batch, context, steps, chosen.budget))
    if options["max_context"] is None:
        chosen = EngineOptions(**(options | {"max_sequences": chosen.max_sequences, "max_context": longest}))
    elif options["max_context"] < longest:
        raise InputError(f"--max-context is {options['max_context']}, but these steps need {longest}; leave it out")
    engine, started = start(model, name, chosen, first=True)
    result = measure_step(engine, started, batch, context, steps, measure_bandwidth(chosen.torch_device))
    if path:
        append(path, torch.cuda.get_device_name(chosen.torch_device), result)
    return result


def print_result(result: StepResult, path: Path | None) -> None:
    from rich.markup import escape

    table, step = result.table, result.step()
    rows: list[tuple[object, ...]] = []
    for row in result.rows():
        gap = "" if row["gap_before_us"] is None else f"{row['gap_before_us']:.1f}"
        launches = "" if row["launches"] is None else row["launches"]
        rows.append((escape(row["kernel"]), launches, f"{row['us']:.1f}", f"{row['percent']:.1f}", gap))
    rows.append(("total", table.launches, f"{table.us:.1f}", "100.0", ""))
    if result.limit_us is not None:
        limit = f"limit: reading {human_bytes(result.read_bytes)} at {step['bandwidth_tb_s']:.2f} TB/s"
        rows.append((limit, "", f"{result.limit_us:.1f}", step["percent_of_limit"], ""))
    title = f"{step['model']}, {step['format']}: one decode step, batch {result.batch}, context {result.context}"
    print_table(title, ("kernel", "launches a step", "us a step", "% of the step", "gap before us"), rows)
    plain = result.unprofiled_us
    share = "" if result.limit_us is None else f", {100 * result.limit_us / plain:.1f} % of the limit"
    click.echo(f"{step['tokens_per_second']:,.1f} tokens/s at this step time")
    others = table.seen - table.alike
    click.echo(f"without the profiler a step takes {plain:.1f} us: {result.batch / plain * 1e6:,.1f} tokens/s{share}")
    click.echo(f"mean of the {table.steps} middle ones of {table.alike} steps; {others} more had other kernels")
    if path:
        click.echo(f"appended to {path}")
