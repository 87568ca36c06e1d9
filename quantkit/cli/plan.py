"""quantkit plan"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from quantkit.cli.common import json_option, print_json, print_table
from quantkit.cli.plan_tables import print_plan
from quantkit.cli.plan_traffic import plan_for_traffic, refuse_traffic_options, traffic_options
from quantkit.errors import InputError

if TYPE_CHECKING:
    from quantkit.eval.plan.gpus import Gpu
    from quantkit.eval.plan.parallel import ParallelPlan
    from quantkit.eval.plan.plan import ServingPlan
    from quantkit.eval.plan.question import Question
    from quantkit.runtime.model.ranks import Ranks

_KV = "KV cache; auto: 16 bits."
_KV_DTYPES = ["auto", "bf16", "fp8", "int8", "int4"]
_RECIPES = "Recipes to plan for, comma-separated names or YAML files; bf16 is always there. Default: eight of them."
_GPU = "Such as h100 or rtx4090; default: the one here, else all of them for memory and an H200 for speed."
_TENSOR = "Plan for ranks that cut every layer; one number or several, such as 2,4,8."
_PIPELINE = "Plan for stages of consecutive layers; one number or several."
_LINK = "Between GPUs: nvlink, pcie, pcie4, GB/s each way, or GB/s:us of a hop.  [default: nvlink,pcie]"
_NEW = "Tokens of an answer, for costs and traffic; default: 256, at most half of the context."
_EXPERTS = "With --tensor-parallel: ranks divide the experts of a layer; models with experts need it."
_EFFICIENCY = "Share of the ceiling that you expect; costs are divided by it.  [default: 1; for traffic as measured]"


@click.command("plan", short_help="What a model takes, and how fast it could be at best.")
@click.argument("model")
@click.option("-r", "--format", "formats", multiple=True, metavar="RECIPES", help=_RECIPES)
@click.option("--gpu", metavar="NAME", help=_GPU)
@click.option(
    "--context", default=4096, show_default=True, metavar="N", help="Tokens of one request, prompt and answer."
)
@click.option("--new-tokens", "--new", type=int, metavar="N", help=_NEW)
@click.option("--batch", default="1,8,32,128", show_default=True, metavar="LIST", help="Concurrent requests.")
@click.option("--kv-dtype", default="auto", show_default=True, type=click.Choice(_KV_DTYPES), help=_KV)
@click.option(
    "--price-per-hour", type=float, metavar="P", help="Price of the GPU, in any currency; adds estimated costs."
)
@click.option("--efficiency", type=float, metavar="X", help=_EFFICIENCY)
@traffic_options
@click.option("--tensor-parallel", metavar="LIST", help=_TENSOR)
@click.option("--expert-parallel", is_flag=True, help=_EXPERTS)
@click.option("--pipeline-parallel", metavar="LIST", help=_PIPELINE)
@click.option("--link", metavar="LIST", help=_LINK)
@click.option("--explain", "explained", is_flag=True, help="Every formula with its numbers, for one format.")
@json_option
def command(
    model: str,
    formats: tuple[str, ...],
    gpu: str | None,
    context: int,
    new_tokens: int | None,
    batch: str,
    kv_dtype: str,
    price_per_hour: float | None,
    efficiency: float | None,
    tensor_parallel: str | None,
    expert_parallel: bool,
    pipeline_parallel: str | None,
    link: str | None,
    explained: bool,
    as_json: bool,
    **traffic: Any,
) -> None:
    """Say what MODEL takes in every format, what fits on which GPU, and how fast it could be at best.

    Reads config.json only. MODEL is a folder, a hub name, `demo`, or a known shape such as llama-3.1-8b.
    Speeds are ceilings from data sheets: no engine reaches them. With --requests-per-day they are predictions, by
    constants fitted to measured rows, of how many GPUs a traffic needs, what they cost and how much they draw.

    \b
    quantkit plan llama-3.1-8b --gpu h200
    quantkit plan org/model -r gptq-w4g128,nf4 --gpu rtx4090 --context 8192
    quantkit plan demo --explain -r nf4
    quantkit plan llama-3.1-70b --gpu h100 --price-per-hour 2.5 --efficiency 0.5
    quantkit plan llama-3.1-70b --tensor-parallel 2,4,8 --link nvlink
    quantkit plan llama-3.1-8b --requests-per-day 1000000 --prompt 512 --new 256 --peak-factor 3 --ttft 1 --tpot 0.05
    """
    from quantkit.eval.plan.question import Question

    batches = _numbers("--batch", batch)
    if traffic["requests_per_day"] is not None:
        question = Question(kv_dtype=kv_dtype, price_per_hour=price_per_hour, efficiency=efficiency or 1.0)
        if tensor_parallel or pipeline_parallel or explained:
            raise InputError(
                "plans for traffic choose --tensor-parallel themselves, and have no --pipeline-parallel "
                "nor --explain; leave them out"
            )
        given = traffic | {"new": new_tokens, "share": efficiency, "link": link}
        plan_for_traffic(model, formats, gpu, question, given, as_json=as_json)
        return
    refuse_traffic_options(traffic)
    question = Question(
        context, batches, kv_dtype, price_per_hour, 1.0 if efficiency is None else efficiency, new_tokens
    )
    names = [name for given in formats for name in given.split(",") if name]
    chosen, note = _choose_gpu(gpu)
    if tensor_parallel is not None or pipeline_parallel is not None:
        layouts = _layouts(tensor_parallel, pipeline_parallel, experts=expert_parallel)
        spread = _plan_parallel(model, names, chosen, question, layouts, link)
        _print_parallel(spread, note, explained=explained, as_json=as_json)
        return
    if expert_parallel:
        raise InputError("--expert-parallel divides experts among GPUs; say how many with --tensor-parallel")
    if link is not None:
        raise InputError("--link joins several GPUs; say how many with --tensor-parallel or --pipeline-parallel")
    plan = _plan(model, names, chosen, question)
    if as_json:
        print_json(_as_json(plan))
    elif explained:
        _print_formulas(plan)
    else:
        print_plan(plan, note, everywhere=gpu is None and not note)


def _plan(model: str, names: list[str], gpu: Gpu, question: Question) -> ServingPlan:
    from quantkit.eval.plan.model import read_model
    from quantkit.eval.plan.plan import DEFAULT_RECIPES, plan_serving
    from quantkit.eval.plan.source import find_config
    from quantkit.recipe import load_recipe

    recipes = [load_recipe(name) for name in names or DEFAULT_RECIPES if name != "bf16"]
    return plan_serving(read_model(*find_config(model)), recipes, gpu, question)


def _layouts(tensor: str | None, pipeline: str | None, *, experts: bool) -> list[Ranks]:
    """Every number of ranks with every number of stages; one rank has all experts."""
    from quantkit.runtime.model.ranks import Ranks

    tensors, stages = _numbers("--tensor-parallel", tensor or "1"), _numbers("--pipeline-parallel", pipeline or "1")
    if experts and max(tensors) == 1:
        raise InputError("--expert-parallel divides experts among the ranks of --tensor-parallel, which is 1; set both")
    return [Ranks(each, stage, experts=experts and each > 1) for each in tensors for stage in stages]


def _plan_parallel(
    model: str, names: list[str], gpu: Gpu, question: Question, layouts: list[Ranks], link: str | None
) -> ParallelPlan:
    from quantkit.eval.plan.links import DEFAULT_LINKS, find_link
    from quantkit.eval.plan.model import read_model
    from quantkit.eval.plan.parallel import plan_parallel
    from quantkit.eval.plan.plan import DEFAULT_RECIPES
    from quantkit.eval.plan.source import find_config
    from quantkit.recipe import load_recipe

    links = [find_link(word.strip()) for word in (link or DEFAULT_LINKS).split(",") if word.strip()]
    recipes = [load_recipe(name) for name in names or DEFAULT_RECIPES if name != "bf16"]
    return plan_parallel(read_model(*find_config(model)), recipes, gpu, question, layouts, links)


def _print_parallel(plan: ParallelPlan, note: str, *, explained: bool, as_json: bool) -> None:
    from quantkit.eval.plan.parallel import title_of
    from quantkit.eval.plan.parallel_explain import explain
    from quantkit.eval.plan.parallel_tables import as_dict, summarize, tables

    if as_json:
        formulas = {"format": plan.focus.name, "lines": dict(explain(plan))}
        print_json(as_dict(plan) | {"summary": list(summarize(plan)), "formulas": formulas})
        return
    if explained:
        ranks = plan.layouts[0]
        click.echo(f"{plan.model.name} as {plan.focus.name} on {ranks.world} x {plan.gpu.title}, {title_of(ranks)}")
        click.echo("\n".join(f"{label:<24} {formula}" for label, formula in explain(plan)))
        return
    click.echo("\n".join(summarize(plan)))
    for table in tables(plan):
        print_table(table.title, table.columns, table.rows, table.footer)
    for warning in filter(None, (note, *plan.warnings)):
        click.echo(f"note: {warning}")


def _as_json(plan: ServingPlan) -> dict[str, Any]:
    from quantkit.eval.plan.explain import explain
    from quantkit.eval.plan.summary import summarize

    formulas = {"format": plan.focus.name if plan.focus else None, "lines": dict(explain(plan))}
    return plan.to_dict() | {"summary": list(summarize(plan)), "formulas": formulas}


def _print_formulas(plan: ServingPlan) -> None:
    from quantkit.eval.plan.explain import explain

    what = f"{plan.model.name} as {plan.focus.name}" if plan.focus else plan.model.name
    click.echo(f"{what} on one {plan.gpu.title}; GB are 10^9 bytes")
    click.echo("\n".join(f"{label:<24} {formula}" for label, formula in explain(plan)))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(dict.fromkeys(int(word) for word in text.split(",") if word.strip()))
    except ValueError:
        numbers = ()
    if not numbers:
        raise InputError(f"{option} is '{text}', but must be whole numbers with commas between, such as 1,8,32")
    return numbers


def _choose_gpu(name: str | None) -> tuple[Gpu, str]:
    """The GPU to plan for, and what to say about the choice."""
    from quantkit.eval.plan.gpus import DEFAULT_GPU, GPUS, find_gpu, present_gpu

    if name is not None:
        return find_gpu(name), ""
    here, reported = present_gpu()
    if here is not None:
        return here, f"planned for the {here.title} here"
    if reported:
        note = f"the GPU here, {reported}, is not in the table; --gpu names one that is like it"
        return GPUS[DEFAULT_GPU], note
    return GPUS[DEFAULT_GPU], ""
