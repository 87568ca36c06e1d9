"""A plan in two sentences."""

from __future__ import annotations

from quantkit.eval.plan.gpus import GPUS
from quantkit.eval.plan.plan import FormatPlan, ServingPlan
from quantkit.eval.plan.roofline import MAX_BATCH


def summarize(plan: ServingPlan) -> tuple[str, ...]:
    """What to know before looking at the tables."""
    if plan.model.decoder is None:
        return (f"{plan.model.name}: {plan.model.remark}.",)
    plain, focus = plan.formats[0], plan.focus
    assert focus is not None
    if not any(found.fit.requests for found in plan.formats):
        return (_fits_not(plan),)
    return (_room(plan, plain, focus), _speed(plan, plain, focus))


def _room(plan: ServingPlan, plain: FormatPlan, focus: FormatPlan) -> str:
    many, few = focus.fit.requests, plain.fit.requests
    of_context = f"requests of {plan.question.context:,} tokens"
    where = f"On one {plan.gpu.title}, {focus.name} leaves"
    if focus is plain:
        return f"{where} room for {few:,} {of_context}."
    if not many:
        return f"{where} no room for {of_context}; other formats do."
    if not few:
        too_large = f"{plain.weights.bytes / 1e9:.1f} GB of weights"
        return f"{where} room for {many:,} {of_context}; bf16 does not fit ({too_large})."
    return f"{where} room for {many / few:.2g} x as many {of_context} as bf16 ({many:,} against {few:,})."


def _speed(plan: ServingPlan, plain: FormatPlan, focus: FormatPlan) -> str:
    context = plan.question.context
    one = focus.ceiling.decode(1, context)
    if focus is plain:
        return f"One request decodes at most {one.tokens_per_second:,.0f} tokens/s."
    base = plain.ceiling.decode(1, context)
    speeds = f"{one.tokens_per_second:,.0f} against {base.tokens_per_second:,.0f} tokens/s"
    return f"One request decodes at most {base.seconds / one.seconds:.1f} x as fast ({speeds}); {_until(focus)}."


def _until(focus: FormatPlan) -> str:
    if focus.stops_helping is None:
        return f"the gain stays above 10 % up to batch {MAX_BATCH:,}"
    return f"the gain falls below 10 % at batch {focus.stops_helping:,}"


def _fits_not(plan: ServingPlan) -> str:
    smallest = min(plan.formats, key=lambda found: found.weights.bytes)
    elsewhere = [GPUS[name].title for name, counts in plan.requests.items() if any(counts.values())]
    where = f"It fits on: {', '.join(elsewhere)}." if elsewhere else "It fits on no single GPU of the table."
    return (
        f"{plan.model.name} does not fit on one {plan.gpu.title} in any of these formats with a cache of "
        f"{plan.question.context:,} tokens: the smallest, {smallest.name}, takes "
        f"{smallest.weights.bytes / 1e9:.1f} GB. {where}"
    )
