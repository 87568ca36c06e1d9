"""`quantkit plan --tensor-parallel`: what every rank holds, and how fast several GPUs could be together.

A step of a stage takes at least what its GPU needs for its part (`roofline.py`), then the collectives of its tensor
ranks, then the sending to the next stage: nothing of it overlaps, as in the runtime. In a pipeline as many
micro-batches are in flight as there are stages. Every figure assumes the links of `links.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from quantkit.errors import InputError
from quantkit.eval.plan.gpus import Gpu
from quantkit.eval.plan.links import Link
from quantkit.eval.plan.memory import Fit, fit, reserve_of
from quantkit.eval.plan.model import Decoder, PlannedModel
from quantkit.eval.plan.question import Question
from quantkit.eval.plan.roofline import MAX_BATCH, Ceiling, mean_context
from quantkit.eval.plan.shards import ACTIVATION, Shard, shard
from quantkit.eval.plan.weights import Chosen, RoutedBytes, choose, keep, weigh
from quantkit.recipe import Recipe
from quantkit.runtime.model.ranks import Ranks, check_parallel

_TENSORS = (1, 2, 4, 8, 16)  # where a smallest layout is looked for
_PIPELINES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class StageTime:
    """Seconds of one step of one stage as a function of its requests."""

    weights: float  # to read them, experts not counted
    cache: float  # to read that of one request
    compute: float  # of one token
    fixed: float  # of collectives and sending, whatever their size
    per_token: float
    routed: tuple[RoutedBytes, ...] = ()
    bandwidth: float = 1.0

    def routed_seconds(self, batch: int) -> float:
        """To read the experts that are chosen."""
        return sum(part.read(batch) for part in self.routed) / self.bandwidth

    def seconds(self, batch: int) -> float:
        weights = self.weights + self.routed_seconds(batch)
        return max(weights + batch * self.cache, batch * self.compute) + self.fixed + batch * self.per_token


@dataclass(frozen=True)
class Stage:
    """One stage: the part of a rank, whether it fits, what bounds its speed."""

    shard: Shard
    fit: Fit
    ceiling: Ceiling


@dataclass(frozen=True)
class Spread:
    """One format on the GPUs of one layout."""

    ranks: Ranks
    stages: tuple[Stage, ...]
    hidden: int

    @property
    def weight_bytes(self) -> int:
        """Of the rank that holds most."""
        return max(stage.shard.weights.bytes for stage in self.stages)

    def cache_bytes(self, question: Question) -> int:
        """Of one token, on the rank that holds most."""
        caches = [stage.shard.cache for stage in self.stages]
        return max(int(cache.per_token * question.itemsize(cache)) for cache in caches)

    @property
    def requests(self) -> int:
        """That fit: all ranks have pages of the same number, the fewest that one has room for."""
        return min(stage.fit.requests for stage in self.stages)

    @property
    def boundary_bytes(self) -> int:
        """That one tensor rank sends to the next stage for a token."""
        return self.hidden * ACTIVATION if self.ranks.pipeline > 1 else 0

    @property
    def micro_batches(self) -> int:
        return self.ranks.pipeline

    @property
    def bubble(self) -> float:
        """Share of the time that a stage idles when its micro-batches fill the pipeline and drain it."""
        return (self.ranks.pipeline - 1) / (self.micro_batches + self.ranks.pipeline - 1)

    def times(self, link: Link, context: int) -> Counter[StageTime]:
        """How many stages take so long to decode."""
        return Counter(self.times_of(stage, link, context) for stage in self.stages)

    def times_of(self, stage: Stage, link: Link, context: int) -> StageTime:
        """Of one of its stages."""
        ceiling, bandwidth = stage.ceiling, stage.ceiling.gpu.bandwidth
        none, one = (self._exchange(stage, link, tokens, tokens) for tokens in (0, 1))
        return StageTime(
            weights=ceiling.weights.read / bandwidth,
            cache=ceiling.cache_bytes(context) / bandwidth,
            compute=ceiling.token_seconds(context),
            fixed=none,
            per_token=one - none,
            routed=ceiling.weights.routed,
            bandwidth=bandwidth,
        )

    def _exchange(self, stage: Stage, link: Link, tokens: int, rows: int) -> float:
        told = stage.shard.traffic.seconds(link, self.ranks.tensor, tokens, rows)
        return told + (link.send(tokens * self.boundary_bytes) if self.ranks.pipeline > 1 else 0.0)

    def prefill_tokens_per_second(self, link: Link, prompt: int) -> float:
        """Of as many prompts as there are micro-batches, one behind the other through all stages."""
        slowest = max(
            stage.ceiling.prefill_seconds(prompt) + self._exchange(stage, link, prompt, 1) for stage in self.stages
        )
        return prompt / slowest * (1 - self.bubble)

    def prefill_seconds(self, link: Link, prompt: int, batch: int) -> float:
        """Until all prompts of a batch are through: in micro-batches that pass the stages one behind the other."""
        each = -(-batch // self.micro_batches)
        stages = [
            stage.ceiling.prefill_seconds(prompt, each) + self._exchange(stage, link, each * prompt, each)
            for stage in self.stages
        ]
        return sum(stages) + (-(-batch // each) - 1) * max(stages)


def step_seconds(times: Counter[StageTime], batch: int) -> float:
    """Until each of `batch` requests has its next token.

    A micro-batch passes all stages one after the other; the slowest stage sees all micro-batches.
    """
    stages = times.total()
    each = -(-batch // stages)
    seconds = {time: time.seconds(each) for time in times}
    passing = sum(count * seconds[time] for time, count in times.items())
    return max(passing, -(-batch // each) * max(seconds.values()))


def pipeline_ahead_from(tensor: Counter[StageTime], pipeline: Counter[StageTime]) -> int | None:
    """The first batch from which a pipeline is faster for good; None where it is not, up to MAX_BATCH."""
    found = None
    for batch in range(MAX_BATCH, 0, -1):
        if step_seconds(pipeline, batch) >= step_seconds(tensor, batch):
            break
        found = batch
    return found


@dataclass(frozen=True)
class SpreadFormat:
    """One format: on one GPU that is thought large enough, and on every layout."""

    chosen: Chosen
    one: Ceiling
    spreads: dict[Ranks, Spread]  # those asked for, then all tensor and all pipeline on as many GPUs

    @property
    def name(self) -> str:
        return self.chosen.name

    def speed_up(self, ranks: Ranks, link: Link, batch: int, context: int) -> float:
        """Times the speed of one GPU."""
        return self.one.decode(batch, context).seconds / self.seconds(ranks, link, batch, context)

    def seconds(self, ranks: Ranks, link: Link, batch: int, context: int) -> float:
        return step_seconds(self.spreads[ranks].times(link, context), batch)

    def answer_tokens_per_second(self, ranks: Ranks, link: Link, batch: int, prompt: int, new: int) -> float:
        """As `Ceiling.answer_tokens_per_second`, of all GPUs together."""
        decode = (new - 1) * self.seconds(ranks, link, batch, mean_context(prompt, new))
        return batch * new / (self.spreads[ranks].prefill_seconds(link, prompt, batch) + decode)


@dataclass(frozen=True)
class ParallelPlan:
    """The whole answer."""

    model: PlannedModel
    decoder: Decoder
    question: Question
    gpu: Gpu
    layouts: tuple[Ranks, ...]
    links: tuple[Link, ...]
    formats: tuple[SpreadFormat, ...]  # bf16 first
    warnings: tuple[str, ...]

    @property
    def focus(self) -> SpreadFormat:
        return self.formats[min(1, len(self.formats) - 1)]

    @property
    def gpu_counts(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(ranks.world for ranks in self.layouts if ranks.world > 1))

    def all_tensor(self, count: int) -> Ranks:
        """So many GPUs without stages."""
        return Ranks(count, experts=any(ranks.experts for ranks in self.layouts))


def plan_parallel(
    model: PlannedModel,
    recipes: Sequence[Recipe],
    gpu: Gpu,
    question: Question,
    layouts: Sequence[Ranks],
    links: Sequence[Link],
) -> ParallelPlan:
    """InputError where the model cannot be cut like this, or fits in no format."""
    if model.decoder is None:
        raise InputError(model.remark)
    for ranks in layouts:
        check_parallel(model.decoder.config, None, ranks)
    formats, refused = [_spread(model.decoder, keep(model.decoder), gpu, question, layouts)], []
    for recipe in recipes:
        try:
            formats.append(_spread(model.decoder, choose(model, recipe), gpu, question, layouts))
        except InputError as error:
            refused.append((recipe.name, error))
    if recipes and len(refused) == len(recipes):
        raise refused[0][1]
    warnings = tuple(f"{name} is left out: {error}" for name, error in refused)
    plan = ParallelPlan(model, model.decoder, question, gpu, tuple(layouts), tuple(links), tuple(formats), warnings)
    if not any(found.spreads[ranks].requests for found in formats for ranks in layouts):
        raise InputError(_fits_not(plan))
    return plan


def _spread(decoder: Decoder, chosen: Chosen, gpu: Gpu, question: Question, layouts: Sequence[Ranks]) -> SpreadFormat:
    cache = spread(decoder, chosen, Ranks(), gpu, question).stages[0].shard.cache
    width, prompts = decoder.attention_width, decoder.prompt_width
    one = Ceiling(cache, width, weigh(chosen, decoder), gpu, question.itemsize(cache), prompts)
    spreads = {ranks: spread(decoder, chosen, ranks, gpu, question) for ranks in layouts}
    experts = any(asked.experts for asked in layouts)
    for ranks in (other for asked in layouts for other in (Ranks(asked.world, experts=experts), Ranks(1, asked.world))):
        if ranks not in spreads:
            try:
                check_parallel(decoder.config, None, ranks)
                spreads[ranks] = spread(decoder, chosen, ranks, gpu, question)
            except InputError:  # nobody asked for it
                continue
    return SpreadFormat(chosen, one, spreads)


def spread(decoder: Decoder, chosen: Chosen, ranks: Ranks, gpu: Gpu, question: Question) -> Spread:
    """One format on one layout; InputError where its groups would be cut apart."""
    stages = tuple(_stages(decoder, chosen, ranks, gpu, question))
    return Spread(ranks, stages, decoder.config.hidden)


def _stages(decoder: Decoder, chosen: Chosen, ranks: Ranks, gpu: Gpu, question: Question) -> Iterator[Stage]:
    for stage in range(ranks.pipeline):
        part = shard(decoder, chosen, replace(ranks, rank=stage * ranks.tensor))
        room = fit(
            gpu,
            part.weights,
            reserve_of(part.decoder, ranks.tensor),
            part.cache,
            question.itemsize(part.cache),
            question.context,
        )
        width, prompts = part.decoder.attention_width, part.decoder.prompt_width
        ceiling = Ceiling(part.cache, width, part.weights, gpu, question.itemsize(part.cache), prompts)
        yield Stage(part, room, ceiling)


def _fits_not(plan: ParallelPlan) -> str:
    most = max(plan.layouts, key=lambda ranks: ranks.world)
    smallest = min(plan.formats, key=lambda found: found.spreads[most].weight_bytes)
    here = smallest.spreads[most]
    room = here.stages[0].fit
    return (
        f"{plan.model.name} does not fit on {most.world} x {plan.gpu.title} ({title_of(most)}) in any of these formats "
        f"with a cache of {plan.question.context:,} tokens: {smallest.name}, the smallest, takes "
        f"{here.weight_bytes / 1e9:.1f} GB of weights and {room.reserve / 1e9:.1f} GB for the engine on a rank, of "
        f"{room.available / 1e9:.1f} GB that may be used; {_smallest_layout(plan, smallest.chosen)}"
    )


def _smallest_layout(plan: ParallelPlan, chosen: Chosen) -> str:
    experts = plan.decoder.config.has_experts
    layouts = (Ranks(each, stages, experts=experts and each > 1) for each in _TENSORS for stages in _PIPELINES)
    for ranks in sorted(layouts, key=lambda ranks: (ranks.world, ranks.pipeline)):
        try:
            check_parallel(plan.decoder.config, None, ranks)
            if spread(plan.decoder, chosen, ranks, plan.gpu, plan.question).requests:
                return f"it fits with {options_of(ranks)}"
        except InputError:
            continue
    return "it fits on no number of them that was tried; take larger GPUs, or a shorter --context"


def title_of(ranks: Ranks) -> str:
    """Such as `tensor 8 x pipeline 2`."""
    parts = {"tensor": ranks.tensor, "pipeline": ranks.pipeline}
    return " x ".join(f"{name} {count}" for name, count in parts.items() if count > 1) or "one GPU"


def options_of(ranks: Ranks) -> str:
    """As the command line spells it."""
    options = {"--tensor-parallel": ranks.tensor, "--pipeline-parallel": ranks.pipeline}
    words = [f"{name} {count}" for name, count in options.items() if count > 1]
    return " ".join([*words, *(["--expert-parallel"] if ranks.experts else [])]) or "one GPU"
