"""`quantkit plan --requests-per-day`: its options, and what it prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.common import print_json, print_table
from quantkit.errors import InputError

if TYPE_CHECKING:
    from quantkit.eval.plan.gpus import Gpu
    from quantkit.eval.plan.question import Question
    from quantkit.eval.plan.traffic import TrafficPlan

_Command = Callable[..., Any]
_OPTIONS = (
    click.option("--requests-per-day", type=float, metavar="N", help="Plan GPUs, cost and power for so many requests."),
    click.option(
        "--prompt", type=int, metavar="N", help="Tokens of a prompt, with --requests-per-day.  [default: 512]"
    ),
    click.option("--peak-factor", type=float, metavar="X", help="The peak over the mean of the day.  [default: 3]"),
    click.option("--ttft", type=float, metavar="SECONDS", help="Goal: the first token, waiting included."),
    click.option("--tpot", type=float, metavar="SECONDS", help="Goal: the mean time between tokens of an answer."),
    click.option(
        "--acceptance", type=float, metavar="A", help="What speculation would bring, if guesses are right so often."
    ),
    click.option("--guesses", type=int, metavar="K", help="Guesses of a step, with --acceptance.  [default: 4]"),
)


def traffic_options(command: _Command) -> _Command:
    """--requests-per-day and what belongs to it; the function gets them as `**traffic`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def refuse_traffic_options(given: Mapping[str, Any]) -> None:
    """Without --requests-per-day, they would be ignored."""
    for name, value in given.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} belongs to a plan for traffic; give --requests-per-day too")


def plan_for_traffic(
    model: str, formats: Sequence[str], gpu: str | None, question: Question, given: Mapping[str, Any], *, as_json: bool
) -> None:
    """Without `gpu`, one format on all GPUs; with it, all formats on that one."""
    from quantkit.eval.plan.gpus import DEFAULT_GPU, find_gpu
    from quantkit.eval.plan.traffic_tables import as_dict, report, summarize, tables

    if given["guesses"] is not None and given["acceptance"] is None:
        raise InputError("--guesses says how many; give --acceptance too, how often they are right")
    chosen = None if gpu is None else find_gpu(gpu)
    names = [name for listed in formats for name in listed.split(",") if name]
    plan = _plan(model, names, chosen, question, given)
    found = report(plan, chosen.name if chosen else DEFAULT_GPU, _guessing(given))
    if as_json:
        print_json(as_dict(found))
        return
    click.echo("\n".join(summarize(found)))
    for table in tables(found):
        print_table(table.title, table.columns, table.rows, table.footer)
    for warning in plan.refused:
        click.echo(f"note: {warning}")


def _plan(model: str, names: list[str], gpu: Gpu | None, question: Question, given: Mapping[str, Any]) -> TrafficPlan:
    from quantkit.eval.plan.gpus import GPUS
    from quantkit.eval.plan.links import find_link
    from quantkit.eval.plan.model import read_model
    from quantkit.eval.plan.plan import DEFAULT_RECIPES
    from quantkit.eval.plan.source import find_config
    from quantkit.eval.plan.traffic import Traffic, plan_traffic
    from quantkit.recipe import load_recipe

    new = 256 if given["new"] is None else given["new"]
    prompt = 512 if given["prompt"] is None else given["prompt"]
    for option, tokens in (("--prompt", prompt), ("--new", new)):
        if tokens < 1:
            raise InputError(f"{option} is {tokens}, but must be 1 or more tokens")
    peak = 3.0 if given["peak_factor"] is None else given["peak_factor"]
    traffic = Traffic(given["requests_per_day"], prompt, new, peak, given["ttft"], given["tpot"])
    usual = DEFAULT_RECIPES if gpu else DEFAULT_RECIPES[:1]
    recipes = [load_recipe(name) for name in names or usual if name != "bf16"]
    link = None if given["link"] is None else find_link(given["link"])
    gpus = [gpu] if gpu else list(GPUS.values())
    return plan_traffic(read_model(*find_config(model)), recipes, gpus, question, traffic, link, given["share"])


def _guessing(given: Mapping[str, Any]) -> Any:
    from quantkit.eval.plan.guessing import Guessing

    if given["acceptance"] is None:
        return None
    return Guessing(given["acceptance"], 4 if given["guesses"] is None else given["guesses"])
