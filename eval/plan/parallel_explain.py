"""Every formula of a plan for several GPUs with its numbers: one format, one layout, one link."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.eval.plan.explain import Line
from quantkit.eval.plan.links import Link
from quantkit.eval.plan.parallel import ParallelPlan, Spread, Stage, StageTime, step_seconds
from quantkit.eval.plan.shards import ACTIVATION
from quantkit.eval.plan.weights import KEPT_BYTES


def explain(plan: ParallelPlan) -> list[Line]:
    """The plan's focus on its first layout over its first link, at the largest batch; stage 0 stands for all."""
    here, link = plan.focus.spreads[plan.layouts[0]], plan.links[0]
    lines = [*_weights(plan, here.stages[0]), *_room(plan, here)]
    if here.ranks.tensor > 1:
        lines += _exchange(plan, here.stages[0], link)
    if here.ranks.pipeline > 1:
        lines += _pipeline(here, link)
    return lines + list(_decode(plan, here, link))


def _weights(plan: ParallelPlan, stage: Stage) -> Iterator[Line]:
    part, config = stage.shard, plan.decoder.config
    ranks, local, blocks = part.ranks, part.decoder.config, len(part.cache.windows)
    yield "blocks of stage 0", f"{config.layers} layers / {ranks.pipeline} stages, rounded down = {blocks}"
    heads = f"{config.heads} / {ranks.tensor} = {local.heads} heads, {config.kv_heads} / {ranks.tensor}"
    replicated = " (at least 1: ranks share one)" if ranks.tensor > config.kv_heads else ""
    if config.has_experts:
        counts = sorted({experts.count for experts in plan.decoder.experts.values()})
        mlp = ", ".join(f"{len(ranks.own_experts(count))} of {count} experts" for count in counts)
    else:
        mlp = f"{config.token_channels:,} / {ranks.tensor} = {local.token_channels:,} channels of the MLP"
    yield "a rank", f"{heads} = {local.kv_heads} KV heads{replicated}, {mlp}"
    weights = part.weights
    stored = f"{part.decoder.linear_weights:,} weights x {weights.linear_bits:.4f} bits / 8"
    yield "linears of a rank", f"{stored} = {_gb(weights.linear_bytes)} ({weights.scheme})"
    rows = ranks.vocabulary_width(config.vocab)
    size = f"{rows:,} of {config.vocab:,} rows x {config.hidden:,} x {KEPT_BYTES}"
    yield "embedding of a rank", f"{size} = {_gb(KEPT_BYTES * rows * config.hidden)}"
    yield "head of a rank", "the same rows" if config.tied else "as much"
    yield (
        part.decoder.others_title,
        f"{part.decoder.other:,} x {KEPT_BYTES} = {KEPT_BYTES * part.decoder.other:,} bytes",
    )
    yield "weights of a rank", f"the sum of these = {_gb(weights.bytes)}"


def _room(plan: ParallelPlan, here: Spread) -> Iterator[Line]:
    tightest = min(here.stages, key=lambda stage: stage.fit.pages)
    cache, room = tightest.shard.cache, tightest.fit
    item = plan.question.itemsize(cache)
    size = f"{cache.layers} layers x {cache.formula} x {float(item):g} bytes = {int(cache.per_token * item):,} bytes"
    yield "cache of a token", f"{size} on a rank"
    left = f"{_gb(room.available)} - {_gb(room.weights)} - {_gb(room.reserve)} for the engine = {_gb(room.cache)}"
    yield "left for the cache", f"{left} (stage {tightest.shard.ranks.stage})"
    yield (
        f"requests of {plan.question.context:,}",
        f"{room.pages:,} pages / {room.pages_per_request:,} = {room.requests:,}",
    )


def _exchange(plan: ParallelPlan, stage: Stage, link: Link) -> Iterator[Line]:
    told, tensor, hidden = stage.shard.traffic, stage.shard.ranks.tensor, plan.decoder.config.hidden
    if told.reduces:
        sizes = f"{told.reduces} x {hidden:,} x {ACTIVATION} bytes"
        yield "all-reduced for a token", f"{sizes} = {told.reduced:,} bytes (embedding, attention, MLP)"
    if told.gathers:
        what = "inputs and outputs of layers that round their inputs, or whose groups act-order scattered"
        yield "gathered for a token", f"{told.gathers} gathers, {told.gathered:,} bytes ({what})"
    yield "logits", f"{plan.decoder.config.vocab:,} x {ACTIVATION} = {told.logits:,} bytes gathered for a sampled token"
    yield (
        "a GPU sends",
        f"(2 x all-reduced + gathered + logits) x {tensor - 1} / {tensor} = {told.sent(tensor):,.0f} bytes",
    )
    yield "link", f"{link.describe()} = {link.bandwidth / 1e9:.1f} GB/s counted with"
    turns, size, seconds = 2, hidden * ACTIVATION, link.all_reduce
    if not told.reduces:
        turns, size, seconds = 1, told.gathered // told.gathers, link.all_gather
    steps, what = turns * (tensor - 1), "an all-reduce" if told.reduces else "a gather, on average"
    rule = f"start + {steps} hops + {steps}/{tensor} x {size:,} bytes / {link.bandwidth / 1e9:.1f} GB/s"
    yield "one of them, 1 token", f"{what}: {rule} = {1e6 * seconds(size, tensor):.2f} us"


def _pipeline(here: Spread, link: Link) -> Iterator[Line]:
    stages, many = here.ranks.pipeline, here.micro_batches
    yield "between stages", f"{here.hidden:,} x {ACTIVATION} = {here.boundary_bytes:,} bytes a token"
    yield "sending a token", f"{1e6 * link.send(here.boundary_bytes):.2f} us ({link.name})"
    idle = f"(p - 1) / (m + p - 1) = {stages - 1} / {many + stages - 1} = {100 * here.bubble:.0f} %"
    yield "idle, filled and drained", f"{idle}, m = {many} micro-batches: of prompts; decoding keeps the pipeline full"


def _decode(plan: ParallelPlan, here: Spread, link: Link) -> Iterator[Line]:
    batch, context = max(plan.question.batches), plan.question.context
    stages = here.ranks.pipeline
    each = -(-batch // stages)
    times = [here.times_of(stage, link, context) for stage in here.stages]
    slowest = max(times, key=lambda time: time.seconds(each))
    yield f"a stage, {each} requests", _stage(slowest, each)
    seconds = step_seconds(here.times(link, context), batch)
    if stages > 1:
        rule = f"max(sum of {stages} stages, {-(-batch // each)} micro-batches x the slowest)"
        yield f"decode, batch {batch}", f"{rule} = {1e3 * seconds:.3f} ms"
    one = plan.focus.one.decode(batch, context).seconds
    yield "one GPU", f"{1e3 * one:.3f} ms, were it large enough"
    gain = f"{1e3 * one:.3f} / {1e3 * seconds:.3f} = {one / seconds:.2f} x"
    yield "speed-up", f"{gain}, {batch / seconds:,.0f} tokens/s, {batch / seconds / here.ranks.world:,.0f} a GPU"


def _stage(time: StageTime, batch: int) -> str:
    moved = f"{1e3 * time.weights:.3f} ms weights + {batch} x {1e6 * time.cache:.2f} us cache"
    if time.routed:
        moved += f" + {1e3 * time.routed_seconds(batch):.3f} ms experts that are chosen"
    computed = f"{batch} x {1e6 * time.compute:.2f} us computing"
    told = f"{1e3 * time.fixed:.3f} ms + {batch} x {1e6 * time.per_token:.2f} us exchanging"
    return f"max({moved}, {computed}) + {told} = {1e3 * time.seconds(batch):.3f} ms"


def _gb(count: float) -> str:
    return f"{count / 1e9:.3f} GB"
