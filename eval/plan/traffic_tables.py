"""A plan for traffic as sentences, tables and one object. Knows nothing about how they are printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.eval.plan.attention_kinds import KindOfAttention, kinds_of_attention
from quantkit.eval.plan.guessing import Gain, Guessing, gain
from quantkit.eval.plan.intensity import Phase, phases, ridge_points
from quantkit.eval.plan.parallel_tables import Table
from quantkit.eval.plan.reached import Reached, reached_by
from quantkit.eval.plan.traffic import Fleet, TrafficPlan

_OFFERED = (1, 8, 32)  # batches at which speculation and intensity are shown, beside the fleet's own


@dataclass(frozen=True)
class TrafficReport:
    """A plan, and what follows from it for the format and the GPU that it speaks of."""

    plan: TrafficPlan
    focus: Fleet
    phases: tuple[Phase, ...]
    gains: tuple[Gain, ...]  # none where no acceptance was given
    guessing: Guessing | None
    kinds: tuple[KindOfAttention, ...]
    reached: tuple[Reached, ...]


def report(plan: TrafficPlan, gpu: str, guessing: Guessing | None) -> TrafficReport:
    """`gpu` is the one that it speaks of, with the first format after bf16."""
    here = plan.of_gpu(gpu)
    focus = here[min(1, len(here) - 1)]
    ceiling, load, traffic = focus.replica.ceiling, focus.load, plan.traffic
    batches = tuple(sorted({*_OFFERED, load.batch if load else 1}))
    efficiency = focus.replica.efficiency
    gains = (gain(efficiency, ceiling, guessing, batch, traffic.context) for batch in batches) if guessing else ()
    schemes = {fleet.replica.ceiling.weights.scheme for fleet in here}
    return TrafficReport(
        plan=plan,
        focus=focus,
        phases=phases(ceiling, traffic.prompt, traffic.context, batches),
        gains=tuple(gains),
        guessing=guessing,
        kinds=kinds_of_attention(plan.decoder, plan.model.cache, plan.question, focus.replica.stage.fit.cache),
        reached=reached_by(schemes, routed=bool(plan.decoder.experts)),
    )


def summarize(found: TrafficReport) -> Iterator[str]:
    """What to know before looking at the tables."""
    traffic, focus = found.plan.traffic, found.focus
    rate = f"{traffic.requests_per_day:,.0f} requests a day are {traffic.peak_rate:.1f} a second at the peak"
    tokens = f"prompts of {traffic.prompt:,}, answers of {traffic.new:,} tokens"
    yield f"{rate} ({traffic.peak_factor:g} x the mean): {tokens}."
    name = f"{found.plan.model.name} as {focus.format} on the {focus.gpu.title}"
    if focus.load is None:
        yield f"{name}: no number of GPUs helps: {focus.limit}."
        return
    load, each = focus.load, f"of {focus.replica.ranks.world} GPUs " if focus.replica.ranks.world > 1 else ""
    yield (
        f"{name} needs {_gpus(focus.gpus)}: a replica {each}carries {load.requests_per_second:.1f} a second, "
        f"{load.batch} at once (limit: {focus.limit}); first token {_ms(load.first_token)} ms, "
        f"{_ms(load.between_tokens)} ms between tokens."
    )
    yield f"Speeds: {focus.evidence.words}."


def tables(found: TrafficReport) -> Iterator[Table]:
    yield _fleets(found.plan)
    yield _intensity(found)
    if found.gains:
        yield _speculation(found)
    yield _attention(found)
    if found.reached:
        yield _reached(found)


def _fleets(plan: TrafficPlan) -> Table:
    price, kinds = plan.question.price_per_hour, {fleet.gpu.title for fleet in plan.fleets}
    several = len(kinds) > 1
    columns = ("GPU" if several else "format", "GPUs", "at once", "requests/s", "first ms", "between ms", "limit")
    columns += ("of ceiling", *(() if price is None else ("cost/day", "cost/request")), "kW", "kWh/1M tokens", "speeds")
    formats = [fleet for fleet in plan.fleets if not several or fleet.format == plan.fleets[-1].format]
    rows = [tuple(_fleet_cells(plan, fleet, several=several)) for fleet in formats]
    name = f"{plan.model.name}{f' as {formats[-1].format}' if several else f' on the {kinds.pop()}'}"
    title = f"{name}: GPUs for {plan.traffic.requests_per_day:,.0f} requests a day"
    return Table(title, columns, rows, "\n".join(_fleet_notes(plan, formats, several=several)))


def _fleet_notes(plan: TrafficPlan, fleets: Sequence[Fleet], *, several: bool) -> Iterator[str]:
    price = plan.question.price_per_hour
    yield "For the peak, all day. requests/s: of a replica, prompts included. first, between: of tokens. -: none helps."
    yield "kW: data-sheet TDP of the GPUs alone, an upper bound. kWh: at that draw and full load, for answers' tokens."
    if price is not None:
        yield f"Costs: {price:g} an hour for each GPU{', the same for every kind' if several else ''}."
    if any(fleet.replica.ranks.world > 1 for fleet in fleets):
        links = dict.fromkeys(fleet.replica.link.describe() for fleet in fleets if fleet.replica.ranks.world > 1)
        yield f"8 = 2 x 4: two replicas of four GPUs that share every layer, over {'; '.join(links)} (assumed)."
    grouped: dict[str, list[str]] = {}
    for fleet in fleets:
        grouped.setdefault(fleet.evidence.words, []).append(fleet.gpu.title if several else fleet.format)
    yield from (f"Speeds of {', '.join(names)} {words}" for words, names in grouped.items())


def _fleet_cells(plan: TrafficPlan, fleet: Fleet, *, several: bool) -> Iterator[str]:
    traffic, price, load = plan.traffic, plan.question.price_per_hour, fleet.load
    yield fleet.gpu.title if several else fleet.format
    if load is None:
        yield from ("-", "-", "-", "-", "-", fleet.limit, "-", *(() if price is None else ("-", "-")), "-", "-", "-")
        return
    world = fleet.replica.ranks.world
    yield f"{fleet.gpus:,}" if world == 1 else f"{fleet.gpus:,} = {fleet.replicas:,} x {world}"
    yield from (f"{load.batch}", f"{load.requests_per_second:.2f}")
    yield from (_ms(load.first_token), _ms(load.between_tokens), fleet.limit)
    yield f"{fleet.percent_of_ceiling(traffic):.0f} %"
    if price is not None:
        cost = fleet.cost_per_day(price)
        yield from (f"{cost:,.2f}", f"{cost / traffic.requests_per_day:.6f}")
    joules = fleet.joules_per_token(traffic)
    yield "-" if fleet.watts is None else f"{fleet.watts / 1e3:.1f}"
    yield "-" if joules is None else f"{joules / 3.6:.3g}"
    yield "measured" if fleet.evidence.measured else "assumed"


def _intensity(found: TrafficReport) -> Table:
    gpu = found.focus.gpu
    rows = [
        (phase.name, f"{phase.per_byte:,.1f}", f"{phase.ridge:,.0f}", phase.arithmetic, phase.bound)
        for phase in found.phases
    ]
    ridges = ", ".join(f"{ridge:,.0f} in {name}" for name, ridge in ridge_points(gpu).items())
    title = f"{gpu.title}, {found.focus.format}: operations per byte"
    columns = ("phase", "operations/byte", "ridge point", "arithmetic", "waits for")
    return Table(
        title, columns, rows, f"Ridge points of the {gpu.title}: {ridges}. Bytes: weights and cache, no activations."
    )


def _speculation(found: TrafficReport) -> Table:
    assert found.guessing is not None
    guessing = found.guessing
    rows = [
        (f"{one.batch}", f"{guessing.tokens_per_step:.2f}", f"{one.speed_up:.2f} x", f"{max(0.0, one.worth):.2f}")
        for one in found.gains
    ]
    title = f"{guessing.guesses} guesses, each right with probability {guessing.acceptance:g}: {found.focus.format}"
    columns = ("batch", "tokens/step", "speed-up, guesses for nothing", "a guess may cost, of a plain step")
    footer = "Arithmetic, from the same constants; `quantkit bench speculative` measures. 0.00: guessing never pays."
    return Table(title, columns, rows, footer)


def _attention(found: TrafficReport) -> Table:
    question = found.plan.question
    rows = [
        (f"{kind.cache.kind}{' (this model)' if kind.own else ''}", kind.cache.formula,
         f"{kind.bytes_per_token:,}", f"{kind.bytes_per_token * question.context / 1e9:.3f}", f"{kind.requests:,}")
        for kind in found.kinds
    ]  # fmt: skip
    title = f"The cache under other kinds of attention, {found.focus.format} on the {found.focus.gpu.title}"
    columns = ("attention", "numbers of a layer", "bytes/token", f"GB for {question.context:,}", "requests that fit")
    return Table(title, columns, rows, "In 16 bits; a what-if: such a model would have to be trained.")


def _reached(found: TrafficReport) -> Table:
    rows = [
        (one.row.date, f"{one.row.case.model} {one.row.case.format}", one.row.case.kv_dtype, _load(one),
         f"{one.row.tokens_per_second:,.0f}", f"{one.ceiling:,.0f}", f"{one.percent:.0f} %",
         f"{one.predicted:,.0f}", f"{100 * one.error:+.0f} %")
        for one in found.reached
    ]  # fmt: skip
    columns = ("date", "model and format", "cache", "load", "tokens/s", "ceiling", "of ceiling", "predicted", "off by")
    footer = "Predicted: by constants fitted to all other rows of its kind. Rows of eval/results/engine.csv, H200."
    return Table("Measured rows of these layouts", columns, rows, footer)


def _load(one: Reached) -> str:
    case = one.row.case
    return f"{case.batch} x ({case.prompt} + {case.new})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _gpus(count: int) -> str:
    return f"{count:,} GPU{'' if count == 1 else 's'}"


def as_dict(found: TrafficReport) -> dict[str, Any]:
    """Everything that the tables say, and what they round."""
    plan = found.plan
    traffic, price = plan.traffic, plan.question.price_per_hour
    return {
        "model": {"name": plan.model.name, "parameters": plan.decoder.parameters},
        "traffic": asdict(traffic) | {"peak_requests_per_second": traffic.peak_rate},
        "fleets": [fleet.to_dict(traffic, price) for fleet in plan.fleets],
        "focus": {"gpu": found.focus.gpu.name, "format": found.focus.format},
        "phases": [phase.to_dict() for phase in found.phases],
        "ridge_points": ridge_points(found.focus.gpu),
        "speculation": _gains(found.guessing, found.gains),
        "attention": [kind.to_dict() for kind in found.kinds],
        "measured": [one.to_dict() for one in found.reached],
        "constants": [
            {"what": part.what, "of": part.of, "value": value}
            for part, value in found.focus.replica.efficiency.constants.items()
        ],
        "summary": list(summarize(found)),
        "warnings": list(plan.refused),
    }


def _gains(guessing: Guessing | None, gains: Sequence[Gain]) -> dict[str, Any] | None:
    if guessing is None:
        return None
    return asdict(guessing) | {"tokens_per_step": guessing.tokens_per_step, "batches": [one.to_dict() for one in gains]}
