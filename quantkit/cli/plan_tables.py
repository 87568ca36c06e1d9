"""The tables of `quantkit plan` for one model on one GPU or on all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from quantkit.cli.common import print_table

if TYPE_CHECKING:
    from quantkit.eval.plan.gpus import Gpu
    from quantkit.eval.plan.plan import FormatPlan, ServingPlan


def print_plan(plan: ServingPlan, note: str, *, everywhere: bool) -> None:
    from quantkit.eval.plan.summary import summarize

    for line in summarize(plan):
        click.echo(line)
    _print_cache(plan)
    if plan.formats:
        _print_weights(plan)
        if not everywhere:
            _print_room(plan)
        elif any(any(counts.values()) for counts in plan.requests.values()):
            _print_requests(plan)
    if any(speed.fits for found in plan.formats for speed in found.speeds):
        _print_speed(plan)
        if plan.question.price_per_hour is not None:
            _print_cost(plan)
    for warning in filter(None, (note, *plan.warnings)):
        click.echo(f"note: {warning}")


def _print_cache(plan: ServingPlan) -> None:
    cache, question = plan.model.cache, plan.question
    size = int(cache.per_token * question.itemsize(cache))
    whole = f"{size * question.context / 1e9:.2f} GB for {question.context:,} tokens"
    click.echo(f"Cache ({cache.kind}): {size:,} bytes a token, {whole}. GB are 10^9 bytes throughout.")


def _print_weights(plan: ServingPlan) -> None:
    columns = ("format", "scheme", "weights GB", "of bf16", "bits/linear weight", "bits/parameter", "multiplies in")
    whole = plan.formats[0].weights.bytes
    rows = []
    for weights in (found.weights for found in plan.formats):
        share = f"{100 * weights.bytes / whole:.0f} %"
        sizes = (f"{weights.bytes / 1e9:.2f}", share, f"{weights.linear_bits:.2f}", f"{weights.bits:.2f}")
        rows.append((weights.name, weights.scheme, *sizes, weights.arithmetic))
    print_table(f"{plan.model.name}: weights", columns, rows)


def _print_requests(plan: ServingPlan) -> None:
    from quantkit.eval.plan.gpus import GPUS

    rows = [
        (_with_memory(GPUS[name]), *(_count(number) for number in counts.values()))
        for name, counts in plan.requests.items()
    ]
    columns = ("GPU", *(found.name for found in plan.formats))
    title = f"Requests of {plan.question.context:,} tokens that fit"
    print_table(title, columns, rows, "Memory from data sheets. -: not one. --gpu NAME shows where the memory goes.")


def _print_room(plan: ServingPlan) -> None:
    columns = ("format", "weights GB", "engine GB", "cache GB", "cached tokens", "requests")
    rows = []
    for found in plan.formats:
        sizes = (found.fit.weights, found.fit.reserve, max(0, found.fit.cache))
        rows.append(
            (found.name, *(f"{size / 1e9:.2f}" for size in sizes), f"{found.fit.tokens:,}", _count(found.fit.requests))
        )
    available = plan.formats[0].fit.available / 1e9
    title = f"{plan.gpu.title}: {available:.1f} GB to use of {plan.gpu.memory / 1e9:.1f} GB ({plan.gpu.source})"
    print_table(title, columns, rows, f"Requests of {plan.question.context:,} tokens. -: not one.")


def _print_speed(plan: ServingPlan) -> None:
    columns = ("format", *(f"batch {size}" for size in plan.question.batches), "prefill")
    columns += ("bandwidth-bound up to batch", "the same without cache", "bf16 within 10 % from batch")
    rows = []
    for found in plan.formats:
        speeds = [f"{speed.step.tokens_per_second:,.0f}" if speed.fits else "-" for speed in found.speeds]
        rows.append((found.name, *speeds, f"{found.prefill_tokens_per_second:,.0f}", *_limits(found)))
    gpu = plan.gpu
    title = f"{gpu.title}: most tokens/s that {gpu.bandwidth / 1e12:.3g} TB/s and its arithmetic allow (ceilings)"
    print_table(title, columns, rows, "-: that many requests do not fit. Data sheet figures; no engine reaches them.")


def _limits(found: FormatPlan) -> tuple[str, str, str]:
    limits = (found.bandwidth_bound_up_to, found.bandwidth_bound_up_to_without_cache)
    bound, bare = ("any" if math.isinf(limit) else f"{limit:,.0f}" for limit in limits)
    if found.name == "bf16":
        return bound, bare, "-"
    return bound, bare, "none" if found.stops_helping is None else f"{found.stops_helping:,}"


def _print_cost(plan: ServingPlan) -> None:
    from quantkit.eval.plan.cost import COST_TITLE, cost_meaning

    columns = ("format", *(f"batch {size}" for size in plan.question.batches))
    rows = [
        (found.name, *(f"{speed.cost:.3f}" if speed.fits and speed.cost is not None else "-" for speed in found.speeds))
        for found in plan.formats
    ]
    print_table(COST_TITLE, columns, rows, cost_meaning(plan.question))


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"


def _with_memory(gpu: Gpu) -> str:
    return gpu.title if "GB" in gpu.title else f"{gpu.title}, {gpu.memory / 1e9:.0f} GB"
