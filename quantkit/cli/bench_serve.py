"""quantkit bench serve"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.common import json_option, print_json, print_table
from quantkit.errors import InputError, QuantkitError

if TYPE_CHECKING:
    from quantkit.eval.serve.bench import Plan, Report
    from quantkit.eval.serve.loads import Load
    from quantkit.eval.serve.results import ServeRow

_DEFAULT_CONCURRENCY = "1,8,32"
_PROMPTS = "JSON lines with prompt or messages, or a text that is cut into prompts; default: random ones."
_TIMES = {"ttft": "TTFT: first token", "tpot": "TPOT: per later token", "itl": "ITL: gap", "e2e": "E2E: whole answer"}
_MARKS = ("mean", "p50", "p95", "p99")
_GOODPUT = "Limits of a good answer: ttft, tpot, itl, e2e."


@click.command("serve", short_help="Time a server: any that speaks OpenAI's HTTP interface.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the server.")
@click.option("--model", metavar="NAME", help="Default: the first that the server lists.")
@click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True)
@click.option("--concurrency", metavar="N", help=f"Concurrent streams; default: {_DEFAULT_CONCURRENCY}.")
@click.option("--rate", metavar="R", help="Instead: requests per second, at random times (Poisson).")
@click.option(
    "--requests", type=click.IntRange(min=1), metavar="N", help="Requests per load; default: 4 for each stream."
)
@click.option("--seconds", type=float, metavar="S", help="Instead: start no request after this long.")
@click.option("--ramp-up", default=0.0, metavar="S", help="Start the streams one by one over S seconds, then count.")
@click.option("--prompt-len", default=128, show_default=True, type=click.IntRange(min=1), help="Tokens of a prompt.")
@click.option("--new-tokens", default=256, show_default=True, type=click.IntRange(min=1), help="Tokens per answer.")
@click.option(
    "--vary", default=0.0, metavar="SHARE", help="Make answers up to this share longer or shorter, such as 0.5."
)
@click.option("--prompts", type=Path, metavar="FILE", help=_PROMPTS)
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, metavar="KEY", help="Sent as a bearer token.")
@click.option("--seed", default=0, show_default=True, help="Seed of prompts and arrivals.")
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Ask for answers of full length.")
@click.option("--goodput", metavar="MS", help=f"{_GOODPUT} Such as ttft=250,itl=50,e2e=10000.")
@click.option("--timeout", default=600.0, show_default=True, metavar="S", help="Seconds that one request may take.")
@click.option(
    "--warm-up", type=click.IntRange(min=0), metavar="N", help="Requests before a load; default: 1 per stream."
)
@click.option("--output", type=Path, metavar="FILE", help="CSV to append to; in a checkout: eval/results/serve.csv.")
@click.option("--no-save", is_flag=True, help="Do not append to a file.")
@click.option("--plot", type=Path, metavar="FILE", help="Draw the waiting times: .svg or .html.")
@json_option
def serve_command(output: Path | None, no_save: bool, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Time a running server: waiting times and tokens per second, as a client sees them. Lists are separated by commas.

    \b
    quantkit bench serve
    quantkit bench serve --concurrency 1,32,256 --prompt-len 512 --plot load.html
    quantkit bench serve --rate 2,8 --seconds 60 --goodput ttft=250,itl=50
    quantkit bench serve --url https://example.com --model NAME --no-ignore-eos --requests 16
    quantkit bench serve --endpoint completions --json --no-save

    Answers are streamed, greedy, and of full length where the server knows ignore_eos. Protocol:
    docs/performance/bench.md.
    """
    from quantkit.eval.serve.bench import run_bench
    from quantkit.eval.serve.plot import check_plot, write_plot
    from quantkit.eval.serve.results import append, results_path

    plan = _plan(options)
    if plot is not None:
        check_plot(plot)
    path = results_path(output, not no_save)

    def on_row(row: ServeRow) -> None:
        if path is not None and row.whole:
            append(path, row)

    report = asyncio.run(run_bench(plan, on_row, _announce))
    asked = f"{plan.prompt_len}" if plan.prompts is None else f"prompts of {plan.prompts.name}"
    about = f" ± {plan.vary:.0%}" if plan.vary else ""
    title = f"{report.facts.model}: {plan.endpoint}, {asked} + {plan.new_tokens}{about} tokens"
    if plot is not None:
        write_plot(plot, title, report.rows)
    if as_json:
        print_json(_as_json(report))
    else:
        _print(title, report, path, plot)
    _refuse_if_all_failed(report.rows)


def _plan(options: dict[str, Any]) -> Plan:
    from quantkit.eval.serve.bench import Plan
    from quantkit.eval.serve.client import Target
    from quantkit.eval.serve.loads import Limits, make_loads

    Target.parse(options["url"])
    concurrency, rate = options.pop("concurrency"), options.pop("rate")
    if concurrency is None and rate is None:
        concurrency = _DEFAULT_CONCURRENCY
    requests, seconds = options.pop("requests"), options.pop("seconds")
    ramp_up = options.pop("ramp_up")
    if not 0 <= ramp_up < math.inf:
        raise InputError(f"--ramp-up is {ramp_up:g}, but must be 0 or more seconds")
    for name, value in (("--seconds", seconds), ("--timeout", options["timeout"])):
        if value is not None and not (0 < value < math.inf):
            raise InputError(f"{name} is {value:g}, but must be above 0")
    loads = make_loads(
        [_whole(part) for part in _parts("--concurrency", concurrency)],
        [_number(part) for part in _parts("--rate", rate)],
        requests,
        seconds,
        ramp_up,
    )
    if not 0 <= options["vary"] < 1:
        raise InputError(f"--vary is {options['vary']:g}, but must be 0 or more and below 1")
    goodput = options.pop("goodput")
    return Plan(loads=tuple(loads), limits=Limits.parse(goodput) if goodput is not None else None, **options)


def _announce(load: Load) -> None:
    """A line for people who wait. A bar would run in a thread of its own and disturb what is measured."""
    if sys.stderr.isatty():
        click.echo(f"measuring {load.name} ...", err=True)


def _as_json(report: Report) -> dict[str, Any]:
    return {"rows": [row.to_dict() for row in report.rows], "notes": list(report.notes)}


def _print(title: str, report: Report, path: Path | None, plot: Path | None) -> None:
    columns = ["load", "requests", "errors", "output tokens/s", "all tokens/s", "requests/s"]
    good = any(row.limits for row in report.rows)
    columns += ["good %", "good/s"] if good else []
    print_table(title, columns, [_rates(row, good) for row in report.rows])
    print_table("milliseconds", ["load", "", *_MARKS], [line for row in report.rows for line in _times(row)])
    for note in (*report.notes, *(note for row in report.rows for note in row.notes())):
        click.echo(f"note: {note}")
    for written in filter(None, (path and f"appended to {path}", plot and f"drawn in {plot}")):
        click.echo(written)


def _rates(row: ServeRow, good: bool) -> list[object]:
    found = row.to_dict()
    wrong = ", ".join(f"{count} {kind}" for kind, count in found["errors"].items())
    rates = [found[f"{name}_per_second"] for name in ("output_tokens", "total_tokens", "requests")]
    cells: list[object] = [row.measured.load.name, found["requests"], wrong or 0, *(_short(rate) for rate in rates)]
    return [*cells, found["goodput"]["percent"], _short(found["goodput"]["per_second"])] if good else cells


def _times(row: ServeRow) -> list[list[str]]:
    """A line for each kind of time that this load has."""
    spreads = {name: row.to_dict()[f"{time}_ms"] for time, name in _TIMES.items()}
    found = [(name, spread) for name, spread in spreads.items() if spread is not None]
    return [
        [row.measured.load.name if place == 0 else "", name, *(_short(spread[mark]) for mark in _MARKS)]
        for place, (name, spread) in enumerate(found)
    ]


def _refuse_if_all_failed(rows: Sequence[ServeRow]) -> None:
    failed = [row for row in rows if not row.whole]
    if failed:
        kind, message = next(iter(failed[0].error_examples.items()), ("no requests", "none was sent"))
        names = ", ".join(row.measured.load.name for row in failed)
        raise QuantkitError(f"no request was answered ({names}): {kind}: {message}")


def _parts(flag: str, text: str | None) -> list[str]:
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if text is not None and not parts:
        raise InputError(f"{flag} is empty; give numbers such as 1,32")
    return parts


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--concurrency has '{text}', but takes whole numbers such as 1,32,256") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--rate has '{text}', but takes numbers such as 0.5,2,8") from None


def _short(value: float | None) -> str:
    """Three digits that matter, and no more."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
