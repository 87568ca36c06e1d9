"""quantkit advise"""

from __future__ import annotations

import click

from quantkit.cli.common import json_option, print_json
from quantkit.errors import InputError

_GOALS = ["latency", "throughput", "memory", "quality"]
_GOAL = "latency: one answer soon; throughput: tokens a second of a GPU; memory: fewest bytes; quality: least loss."
_REQUESTS = "Requests at once that must fit; default: one, for throughput as many as fit."


@click.command("advise", short_help="One recommendation for a goal: reasons, commands.")
@click.argument("model")
@click.option("--gpu", metavar="NAME", help="Such as h200 or rtx4090; default: the one here.")
@click.option("--goal", required=True, type=click.Choice(_GOALS), help=_GOAL)
@click.option("--prompt", default=512, show_default=True, metavar="N", help="Tokens of a prompt.")
@click.option("--new", default=256, show_default=True, metavar="N", help="Tokens of an answer.")
@click.option("--requests", type=int, metavar="N", help=_REQUESTS)
@click.option(
    "--gpus", default=1, show_default=True, metavar="N", help="GPUs that may share the model, at most: 1 to 8."
)
@json_option
def command(
    model: str, gpu: str | None, goal: str, prompt: int, new: int, requests: int | None, gpus: int, as_json: bool
) -> None:
    """Recommend a format, cache, parallelism, speculation and batch for MODEL, say why, and what would change it.

    MODEL is a folder, a GGUF file, a hub name, `demo`, or a known shape such as llama-3.1-8b. Nothing is measured here:
    every reason names the measured row or the formula of `quantkit plan` that it rests on.

    \b
    quantkit advise llama-3.1-8b --gpu h200 --goal latency
    quantkit advise demo --gpu l4 --goal throughput --prompt 1024 --new 128
    quantkit advise llama-3.1-70b --gpu h100 --goal quality --requests 32 --gpus 4
    quantkit advise org/model --gpu rtx4090 --goal memory --json
    """
    from quantkit.eval.advice.advise import advice_of, decide
    from quantkit.eval.advice.options import Asked, read_subject
    from quantkit.eval.plan.gpus import find_gpu, present_gpu

    chosen = find_gpu(gpu) if gpu else present_gpu()[0]
    if chosen is None:
        raise InputError("no GPU is here that the table knows; name one, such as --gpu h200")
    asked = Asked(goal, chosen, prompt, new, requests, gpus)  # type: ignore[arg-type]  # click checked it
    decision = decide(read_subject(model), asked)
    if as_json:
        print_json(decision.to_dict())
    else:
        click.echo("\n".join(advice_of(decision).lines()))
