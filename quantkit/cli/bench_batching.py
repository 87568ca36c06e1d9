"""quantkit bench batching"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.bench_engine import check_shape_name
from quantkit.cli.common import json_option, print_json, print_table, progress_bar
from quantkit.cli.engine_options import engine_options
from quantkit.errors import InputError
from quantkit.extras import require

if TYPE_CHECKING:
    from quantkit.eval.batching.results import BatchingResult
    from quantkit.eval.batching.run import Plan

_SHAPE, _FORMAT = "llama-3.1-8b", "w4"
_COUNT = click.IntRange(min=1)
_MOST_CONTEXT = {"cuda": 2048, "cpu": 1024}  # without --max-context, where the model goes so far
_ON_GPU = {"batch": 32, "requests": 768, "prompt_len": 128, "new_tokens": 128, "prefix_requests": 16}
# On a CPU a minute with the bundled model.
_ON_CPU = {"batch": 4, "requests": 48, "prompt_len": 64, "new_tokens": 32, "prefix_requests": 8}
_OTHERS = ("spread", "lengths", "prefix_len", "rounds", "seed")
_OWN, _ANSWER = 32, 8  # tokens that each request with a common beginning has of its own, and is answered with


def _usual(name: str) -> str:
    return f"Default: {_ON_GPU[name]}, on a CPU {_ON_CPU[name]}."


@click.command("batching", short_help="Compare static, continuous and paged batches, cold and shared prefixes.")
@click.argument("model", required=False)
@click.option("--shape", metavar="S", help=f"A model's shape with random weights; default: {_SHAPE}.")
@click.option("--format", "format_name", metavar="F", help=f"Of a shape; default: {_FORMAT}.")
@click.option(
    "--batch",
    type=_COUNT,
    metavar="N",
    help=f"Requests of a static batch; the cache has room for N of the longest. {_usual('batch')}",
)
@click.option("--requests", type=_COUNT, metavar="N", help=f"Of the mixed load. {_usual('requests')}")
@click.option("--prompt-len", type=_COUNT, metavar="N", help=f"Median tokens of a prompt. {_usual('prompt_len')}")
@click.option("--new-tokens", type=_COUNT, metavar="N", help=f"Median tokens of an answer. {_usual('new_tokens')}")
@click.option("--spread", default=1.2, show_default=True, help="Deviation of the logarithms of lengths; 0: all alike.")
@click.option("--lengths", type=Path, metavar="FILE", help="Lengths instead: JSON lines or .csv; see the page below.")
@click.option("--prefix-len", type=_COUNT, metavar="N", help="Tokens in common; default: 3/4 of the longest context.")
@click.option(
    "--prefix-requests",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"Requests that begin with them. {_usual('prefix_requests')}",
)
@click.option("--rounds", default=1, show_default=True, type=_COUNT, help="Ways take turns; the median round counts.")
@click.option("--seed", default=0, show_default=True, help="Of the order of lengths, and of random tokens.")
@click.option("--output", type=Path, metavar="FILE", help="CSV to append to; in a checkout: eval/results/batching.csv.")
@click.option("--no-save", is_flag=True, help="Do not append to a file.")
@click.option("--plot", type=Path, metavar="FILE", help="Draw it: .png or .svg.")
@engine_options
@json_option
def batching_command(
    model: str | None,
    shape: str | None,
    format_name: str | None,
    output: Path | None,
    no_save: bool,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare ways to serve one mixed load on one engine: MODEL is a folder, a hub name or `demo`; or --shape.

    \b
    quantkit bench batching demo
    quantkit bench batching --shape llama-3.1-8b --format w4 --plot batching.png
    quantkit bench batching demo --batch 8 --requests 128 --max-context 2048 --rounds 3
    quantkit bench batching --lengths trace.csv --requests 500 --json

    Static batches against continuous ones; room reserved for the longest context against pages; cold prompts against
    shared prefixes. Steps and counts of tokens have no noise; times have. Protocol: docs/performance/bench.md.
    """
    from quantkit.eval.batching.results import COLUMNS, FILE
    from quantkit.eval.engine.csv_file import results_path

    if model is not None and shape is not None:
        raise InputError("give a MODEL or a --shape, not both")
    check_shape_name(shape)
    if plot is not None:
        require("--plot", "report")
        from quantkit.eval.batching.plot import check_plot

        check_plot(plot)
    path = results_path(output, not no_save, FILE, COLUMNS)
    device, result = _measure(model or shape or _SHAPE, format_name, options)
    _keep(device, result, path, plot)
    if as_json:
        print_json(result.to_dict())
    else:
        print_result(result, path, plot)


def _measure(model: str, format_name: str | None, options: dict[str, Any]) -> tuple[str, BatchingResult]:
    """And the name of the device."""
    import torch

    from quantkit.eval.batching.results import BatchingResult
    from quantkit.eval.batching.run import cache_options, measure
    from quantkit.eval.engine.shapes import SHAPES
    from quantkit.eval.engine.start import formats_of, start
    from quantkit.runtime.core.options import EngineOptions

    asked = format_name or (_FORMAT if model in SHAPES else None)
    (name,) = formats_of(model, [asked] if asked else [])
    own = {flag: options.pop(flag) for flag in (*_ON_GPU, *_OTHERS)}
    given = EngineOptions(**options)
    device = given.torch_device
    context = given.max_context or min(_most_positions(model), _MOST_CONTEXT[device.type])
    plan = _plan(own, context, _ON_GPU if device.type == "cuda" else _ON_CPU)
    chosen = cache_options(plan.places, context, given)
    with progress_bar("batching") as advance:
        engine, started = start(model, name, chosen, first=True)
        found = measure(engine, plan, advance)
    described = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return described, BatchingResult(started, context, found)


def _most_positions(model: str) -> int:
    from quantkit.checkpoint import Checkpoint
    from quantkit.eval.engine.shapes import SHAPES
    from quantkit.runtime.model.config import read_model_config
    from quantkit.sources import model_folder

    raw = SHAPES[model] if model in SHAPES else Checkpoint(model_folder(model)).config
    return read_model_config(raw).max_positions


def _plan(own: dict[str, Any], context: int, usual: dict[str, int]) -> Plan:
    from quantkit.eval.batching.load import PrefixLoad, load_of_file, lognormal_load
    from quantkit.eval.batching.run import Plan

    sizes, file, seed = {name: own[name] or usual[name] for name in usual}, own["lengths"], own["seed"]
    if file is None:
        count, prompt, new = (sizes[name] for name in ("requests", "prompt_len", "new_tokens"))
        load = lognormal_load(count, prompt, new, own["spread"], context, seed)
    elif own["prompt_len"] or own["new_tokens"]:
        raise InputError("--lengths has all lengths; leave out --prompt-len and --new-tokens")
    else:
        load = load_of_file(file, own["requests"], context, seed)
    prefix, each = own["prefix_len"] or context * 3 // 4, min(_OWN, context // 8)
    if prefix + each + _ANSWER > context:
        raise InputError(
            f"a prefix of {prefix} tokens, {each} more and an answer of {_ANSWER} do not fit a context of {context}; "
            "lower --prefix-len or raise --max-context"
        )
    prefixes = PrefixLoad(sizes["prefix_requests"], prefix, each, _ANSWER, seed)
    return Plan(sizes["batch"], load, prefixes, own["rounds"])


def _keep(device: str, result: BatchingResult, path: Path | None, plot: Path | None) -> None:
    from quantkit.eval.batching.results import append

    if path is not None:
        append(path, device, result)
    if plot is not None:
        from quantkit.eval.batching.plot import write_plot

        write_plot(plot, device, result)


def print_result(result: BatchingResult, path: Path | None, plot: Path | None) -> None:
    from rich.markup import escape

    plan, rows, ratios = result.found.plan, result.rows(), result.found.ratios
    mixed, prefixes = rows[:3], rows[3:]
    load = f"{len(plan.load.requests)} requests, {plan.load.source}"
    tokens = f"{plan.load.prompt_tokens:,} prompt and {plan.load.output_tokens:,} output tokens"
    print_table(
        escape(f"{result.started.model}, {result.started.format}: {load} ({tokens})"),
        ("way", "tokens/s", "steps", "at once", "most", "taken cache full %", "all cache full %", "preempted"),
        [[_name(row, plan.places), *(row[column] for column in _MIXED)] for row in mixed],
    )
    print_table(
        f"{plan.prefixes.requests} requests, {prefixes[0]['load']} tokens, one after the other",
        ("way", "first token ms p50", "prompt tokens computed"),
        [[row["way"], row["first_token_ms_p50"], row["computed_prompt_tokens"]] for row in prefixes],
    )
    for line in _sentences(result, ratios, rows):
        click.echo(line)
    for written in filter(None, (path and f"appended to {path}", plot and f"drawn in {plot}")):
        click.echo(written)


_MIXED = (
    *("tokens_per_second", "steps", "requests_mean", "requests_most"),
    *("filled_percent", "cache_percent", "preemptions"),
)


def _name(row: dict[str, Any], places: int) -> str:
    return {
        "static": f"static: batches of {places}",
        "continuous": f"continuous: {places} reserved places",
        "paged": "paged: as many as fit",
    }[row["way"]]


def _sentences(result: BatchingResult, ratios: dict[str, float], rows: list[dict[str, Any]]) -> list[str]:
    same = [f"{row['same_answers']} of {row['requests']} {row['way']}" for row in (*rows[1:3], rows[4])]
    return [
        f"continuous over static: {ratios['continuous_over_static_tokens_per_second']:.2f} times the tokens/s, "
        f"static takes {ratios['static_over_continuous_steps']:.2f} times the steps",
        f"pages over places of {result.max_context:,} tokens: {ratios['paged_over_reserved_requests']:.2f} times the "
        f"requests in {result.started.kv_tokens:,} tokens of cache, "
        f"{ratios['paged_over_reserved_tokens_per_second']:.2f} times the tokens/s",
        f"shared over cold prefixes: first token {ratios['cold_over_shared_first_token']:.2f} times sooner, "
        f"{ratios['cold_over_shared_prompt_tokens']:.2f} times fewer prompt tokens computed",
        f"same answers as static batches and cold prompts: {', '.join(same)}",
    ]
