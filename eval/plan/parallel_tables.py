"""A plan for several GPUs as sentences, tables and one object. Knows nothing about how they are printed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.eval.plan.cost import COST_TITLE, cost_meaning, cost_of_million
from quantkit.eval.plan.links import Link
from quantkit.eval.plan.parallel import ParallelPlan, Spread, SpreadFormat, pipeline_ahead_from, title_of
from quantkit.runtime.model.ranks import Ranks


@dataclass(frozen=True)
class Table:
    """What `print_table` takes."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    footer: str = ""


def summarize(plan: ParallelPlan) -> Iterator[str]:
    """One sentence for each layout."""
    found, question = plan.focus, plan.question
    for ranks in plan.layouts:
        here = found.spreads[ranks]
        start = f"{ranks.world} x {plan.gpu.title}, {title_of(ranks)}: {found.name} takes"
        start += f" {here.weight_bytes / 1e9:.2f} GB of weights on a rank"
        if not here.requests:
            yield f"{start}, which leaves no room for a request of {question.context:,} tokens."
            continue
        gains = ", ".join(
            f"{found.speed_up(ranks, link, 1, question.context):.1f} x ({link.name})" for link in plan.links
        )
        room = f"{here.requests:,} requests of {question.context:,} tokens"
        yield f"{start}, leaves room for {room}, and decodes one request {gains} as fast as one GPU."


def tables(plan: ParallelPlan) -> Iterator[Table]:
    yield _memory(plan)
    yield _requests(plan)
    if any(ranks.tensor > 1 for ranks in plan.layouts):
        yield _traffic(plan)
    yield _decode(plan)
    if plan.question.price_per_hour is not None:
        yield _cost(plan)
    for link in plan.links if plan.gpu_counts else ():
        yield _tensor_or_pipeline(plan, link)


def _memory(plan: ParallelPlan) -> Table:
    columns = ("GPUs", "layout", "cache bytes/token", *(found.name for found in plan.formats))
    rows = []
    for ranks in plan.layouts:
        spreads = [found.spreads[ranks] for found in plan.formats]
        sizes = (f"{here.weight_bytes / 1e9:.2f}" for here in spreads)
        cache = f"{spreads[0].cache_bytes(plan.question):,}"
        rows.append((str(ranks.world), title_of(ranks), cache, *sizes))
    return Table(f"{plan.model.name}: GB of weights on a rank", columns, rows, "Of the rank that holds most.")


def _requests(plan: ParallelPlan) -> Table:
    columns = ("GPUs", "layout", *(found.name for found in plan.formats))
    rows = [
        (str(ranks.world), title_of(ranks), *(_count(found.spreads[ranks].requests) for found in plan.formats))
        for ranks in plan.layouts
    ]
    footer = f"{plan.gpu.title}, {plan.gpu.memory / 1e9:.0f} GB each ({plan.gpu.source}). -: not one."
    return Table(f"Requests of {plan.question.context:,} tokens that fit", columns, rows, footer)


def _traffic(plan: ParallelPlan) -> Table:
    cut = [ranks for ranks in plan.layouts if ranks.tensor > 1]
    counted = ("format", "all-reduces", "bytes reduced", "gathers", "bytes gathered", "bytes of logits")
    columns = (*counted, *(f"MB, {title_of(ranks)}" for ranks in cut))
    rows = []
    for found in plan.formats:
        told = [stage.shard.traffic for stage in found.spreads[cut[0]].stages]
        sums = (sum(getattr(one, name) for one in told) for name in _TRAFFIC)
        sent = (f"{_sent(found.spreads[ranks]) / 1e6:.2f}" for ranks in cut)
        rows.append((found.name, *(f"{number:,}" for number in sums), *sent))
    footer = "Collectives of a step, bytes of one token; MB: what the busiest GPU sends for it, around a ring."
    hidden = plan.formats[0].spreads[plan.layouts[0]].hidden
    if any(ranks.pipeline > 1 for ranks in plan.layouts):
        footer += f" Between stages: {2 * hidden:,} bytes, and as much back from the last."
    return Table("What tensor ranks tell each other, all layers together", columns, rows, footer)


_TRAFFIC = ("reduces", "reduced", "gathers", "gathered", "logits")


def _sent(here: Spread) -> float:
    return max(stage.shard.traffic.sent(here.ranks.tensor) for stage in here.stages)


def _decode(plan: ParallelPlan) -> Table:
    columns = ("layout", "format", *(f"{link.name} {batch}" for link in plan.links for batch in plan.question.batches))
    rows = []
    for ranks in plan.layouts:
        for found in plan.formats:
            cells = (_gain(plan, found, ranks, link, batch) for link in plan.links for batch in plan.question.batches)
            rows.append((title_of(ranks), found.name, *cells))
    footer = (
        f"-: do not fit. One GPU: thought large enough. Assumed: {'; '.join(link.describe() for link in plan.links)}."
    )
    title = f"Decode by link and batch: times one {plan.gpu.title}, contexts of {plan.question.context:,} tokens"
    return Table(title, columns, rows, footer)


def _gain(plan: ParallelPlan, found: SpreadFormat, ranks: Ranks, link: Link, batch: int) -> str:
    if batch > found.spreads[ranks].requests:
        return "-"
    return f"{found.speed_up(ranks, link, batch, plan.question.context):.2f}"


def _cost(plan: ParallelPlan) -> Table:
    link, question = plan.links[0], plan.question
    columns = ("layout", "format", *(f"batch {batch}" for batch in question.batches))
    rows = []
    for ranks in plan.layouts:
        for found in plan.formats:
            costs = (_cost_of(plan, found, ranks, link, batch) for batch in question.batches)
            cells = (
                f"{cost:.3f}" if batch <= found.spreads[ranks].requests else "-"
                for cost, batch in zip(costs, question.batches, strict=True)
            )
            rows.append((title_of(ranks), found.name, *cells))
    return Table(COST_TITLE, columns, rows, cost_meaning(question, f" for each GPU, {link.name} between them"))


def _cost_of(plan: ParallelPlan, found: SpreadFormat, ranks: Ranks, link: Link, batch: int) -> float:
    question = plan.question
    rate = found.answer_tokens_per_second(ranks, link, batch, question.prompt, question.new)
    cost = cost_of_million(question, rate, ranks.world)
    assert cost is not None
    return cost


def _tensor_or_pipeline(plan: ParallelPlan, link: Link) -> Table:
    most = max(plan.question.batches)
    decoding = ("ms alone: tensor", "pipeline", "decode/s: tensor", "pipeline", "pipeline ahead from batch")
    columns = ("GPUs", "format", *decoding, "prefill/s: tensor", "pipeline")
    rows = []
    for count in plan.gpu_counts:
        for found in plan.formats:
            both = (plan.all_tensor(count), Ranks(1, count))
            alone = (_speed(plan, found, ranks, link, 1, alone=True) for ranks in both)
            full = (_speed(plan, found, ranks, link, most) for ranks in both)
            prefill = (_prefill(plan, found, ranks, link) for ranks in both)
            rows.append((str(count), found.name, *alone, *full, _ahead(plan, found, count, link), *prefill))
    title = f"All tensor or all pipeline on the same GPUs ({link.name})"
    footer = (
        f"ms a token of one request; tokens/s a GPU, decoding {most} requests, and prefilling as many prompts as there "
    )
    footer += "are stages. -: cannot be cut so, or does not fit."
    return Table(title, columns, rows, footer)


def _speed(
    plan: ParallelPlan, found: SpreadFormat, ranks: Ranks, link: Link, batch: int, *, alone: bool = False
) -> str:
    if ranks not in found.spreads or batch > found.spreads[ranks].requests:
        return "-"
    seconds = found.seconds(ranks, link, batch, plan.question.context)
    return f"{1e3 * seconds:.2f}" if alone else f"{batch / seconds / ranks.world:,.0f}"


def _prefill(plan: ParallelPlan, found: SpreadFormat, ranks: Ranks, link: Link) -> str:
    if ranks not in found.spreads or not found.spreads[ranks].requests:
        return "-"
    return f"{found.spreads[ranks].prefill_tokens_per_second(link, plan.question.context) / ranks.world:,.0f}"


def ahead_from(plan: ParallelPlan, found: SpreadFormat, count: int, link: Link) -> int | None:
    """The batch from which a pipeline on so many GPUs decodes faster than tensor ranks; None: never, or no such cut."""
    both = [found.spreads.get(ranks) for ranks in (plan.all_tensor(count), Ranks(1, count))]
    if both[0] is None or both[1] is None:
        return None
    context = plan.question.context
    return pipeline_ahead_from(both[0].times(link, context), both[1].times(link, context))


def _ahead(plan: ParallelPlan, found: SpreadFormat, count: int, link: Link) -> str:
    pipeline = found.spreads.get(Ranks(1, count))
    batch = ahead_from(plan, found, count, link)
    if pipeline is None or plan.all_tensor(count) not in found.spreads or not pipeline.requests:
        return "-"
    return "none that fits" if batch is None or batch > pipeline.requests else f"{batch:,}"


def as_dict(plan: ParallelPlan) -> dict[str, Any]:
    """Everything that the tables say, and what they round."""
    question = plan.question
    return {
        "model": {"name": plan.model.name, "parameters": plan.decoder.parameters},
        "question": asdict(question),
        "gpu": asdict(plan.gpu),
        "links": [asdict(link) | {"bandwidth": link.bandwidth} for link in plan.links],
        "layouts": [
            {
                "tensor": ranks.tensor,
                "pipeline": ranks.pipeline,
                "gpus": ranks.world,
                "formats": [_format_dict(plan, found, ranks) for found in plan.formats],
            }
            for ranks in plan.layouts
        ],
        "tensor_or_pipeline": [
            {
                "gpus": count,
                "format": found.name,
                "link": link.name,
                "pipeline_ahead_from_batch": ahead_from(plan, found, count, link),
            }
            for count in plan.gpu_counts
            for found in plan.formats
            for link in plan.links
        ],
        "warnings": list(plan.warnings),
    }


def _format_dict(plan: ParallelPlan, found: SpreadFormat, ranks: Ranks) -> dict[str, Any]:
    here, question = found.spreads[ranks], plan.question
    return {
        "name": found.name,
        "scheme": found.chosen.scheme,
        "weight_bytes_per_rank": here.weight_bytes,
        "cache_bytes_per_token_and_rank": here.cache_bytes(question),
        "requests": here.requests,
        "boundary_bytes_per_token": here.boundary_bytes,
        "micro_batches": here.micro_batches,
        "bubble": here.bubble,
        "stages": [
            {
                "blocks": [stage.shard.ranks.blocks(plan.decoder.config.layers)[i] for i in (0, -1)],
                "weight_bytes": stage.fit.weights,
                "engine_bytes": stage.fit.reserve,
                "cache_bytes": max(0, stage.fit.cache),
                "traffic_per_token": asdict(stage.shard.traffic) | {"sent": stage.shard.traffic.sent(ranks.tensor)},
            }
            for stage in here.stages
        ],
        "decode": [
            {
                "link": link.name,
                "batch": batch,
                "fits": batch <= here.requests,
                "seconds": (seconds := found.seconds(ranks, link, batch, question.context)),
                "tokens_per_second_per_gpu": batch / seconds / ranks.world,
                "times_one_gpu": found.speed_up(ranks, link, batch, question.context),
            }
            for link in plan.links
            for batch in question.batches
        ],
        "prefill_tokens_per_second": {
            link.name: _finite(here.prefill_tokens_per_second(link, question.context)) for link in plan.links
        },
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"
