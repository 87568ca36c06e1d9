"""`quantkit plan --requests-per-day`: how many GPUs serve so many requests, what they cost and how much they draw.

The day's mean rate times the peak factor is what the GPUs must carry. A replica (one GPU, or several that share every
layer) carries `batch / life` requests a second, where `batch` requests run at once and

    life = computing the prompts of all of them + (new - 1) x a step at the mean context

so a prompt takes its time from the tokens of others. The batch is the largest that fits in the cache and keeps the
goals:

    time between tokens = life / (new - 1)
    first token         = a step that runs + the wait for other prompts + the own prompt

Prompts wait for each other as in a queue with random arrivals and equal service (M/D/1): u x prompt / (2 (1 - u)), u
being the share of time that prompts take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quantkit.errors import InputError
from quantkit.eval.plan.efficiency import Efficiency, Evidence, efficiency_on, evidence_for
from quantkit.eval.plan.gpus import Gpu
from quantkit.eval.plan.links import Link, usual_link
from quantkit.eval.plan.memory import SEQUENCES
from quantkit.eval.plan.model import Decoder, PlannedModel
from quantkit.eval.plan.parallel import Stage, spread
from quantkit.eval.plan.question import Question
from quantkit.eval.plan.roofline import Ceiling, mean_context
from quantkit.eval.plan.weights import Chosen, choose, keep
from quantkit.recipe import Recipe
from quantkit.runtime.model.ranks import Ranks, check_parallel

TENSORS = (1, 2, 4, 8)  # GPUs of a replica that are tried
DAY = 86_400  # seconds


@dataclass(frozen=True)
class Traffic:
    """What is to be served."""

    requests_per_day: float
    prompt: int
    new: int
    peak_factor: float = 3.0
    ttft: float | None = None  # goal for the first token, seconds
    tpot: float | None = None  # goal for the mean time between tokens, seconds

    def __post_init__(self) -> None:
        limits = {"--requests-per-day": self.requests_per_day, "--ttft": self.ttft, "--tpot": self.tpot}
        for option, value in limits.items():
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{option} is {value:g}, but must be more than 0")
        if not 1 <= self.peak_factor < math.inf:
            raise InputError(f"--peak-factor is {self.peak_factor:g}, but must be 1 or more: the peak over the mean")

    @property
    def peak_rate(self) -> float:
        """Requests a second."""
        return self.requests_per_day / DAY * self.peak_factor

    @property
    def context(self) -> int:
        """Of the steps, on average."""
        return mean_context(self.prompt, self.new)


@dataclass(frozen=True)
class Replica:
    """One engine: one format of a model on one GPU, or on several that share every layer."""

    ranks: Ranks
    stage: Stage  # that of one rank: all have the same
    efficiency: Efficiency
    link: Link

    @property
    def ceiling(self) -> Ceiling:
        return self.stage.ceiling

    @property
    def room(self) -> int:
        """Requests that run at once: those that fit, and no more than the engine takes without being told."""
        return min(self.stage.fit.requests, SEQUENCES)

    def step_seconds(self, batch: int, context: int) -> float:
        told = self.stage.shard.traffic.seconds(self.link, self.ranks.tensor, batch, batch)
        return self.efficiency.step_seconds(self.ceiling, batch, context) + told

    def prompt_seconds(self, prompt: int, batch: int = 1) -> float:
        told = self.stage.shard.traffic.seconds(self.link, self.ranks.tensor, prompt * batch, batch)
        return self.efficiency.prompt_seconds(self.ceiling, prompt, batch) + told

    def load(self, traffic: Traffic, batch: int) -> Load:
        """As fast as it can, with so many requests at once."""
        step = self.step_seconds(batch, traffic.context)
        life = self.prompt_seconds(traffic.prompt, batch) + (traffic.new - 1) * step
        own = self.prompt_seconds(traffic.prompt)
        share = min(batch / life * own, 0.99)
        first = step + own + share * own / (2 * (1 - share))
        return Load(batch, batch / life, first, life / (traffic.new - 1) if traffic.new > 1 else 0.0, step, own)

    def most(self, traffic: Traffic) -> tuple[Load | None, str]:
        """The largest load that keeps the goals, and what stands in the way of a larger one.

        That is memory, a goal, or the number of sequences that the engine takes.
        """
        if not self.room:
            return None, "does not fit"
        low, high, limit = 0, self.room, "memory" if self.room < SEQUENCES else "sequences"
        while low < high:  # more requests make every one of them slower
            middle = (low + high + 1) // 2
            missed = _missed(self.load(traffic, middle), traffic)
            low, high, limit = (low, middle - 1, missed) if missed else (middle, high, limit)
        return (self.load(traffic, low), limit) if low else (None, f"one request alone misses {limit}")


@dataclass(frozen=True)
class Load:
    """What a replica does with so many requests at once. Seconds."""

    batch: int
    requests_per_second: float
    first_token: float
    between_tokens: float
    step: float
    prompt: float  # to compute one alone


@dataclass(frozen=True)
class Fleet:
    """The GPUs of one kind that serve a traffic in one format."""

    gpu: Gpu
    format: str
    replica: Replica
    load: Load | None  # of a replica at its limit; None: no number of them helps
    limit: str  # what stands in the way of more, or of any
    replicas: int
    evidence: Evidence

    @property
    def gpus(self) -> int:
        return self.replicas * self.replica.ranks.world

    def cost_per_day(self, price_per_hour: float) -> float:
        """All of them all day, though the peak does not last."""
        return 24 * price_per_hour * self.gpus

    @property
    def watts(self) -> int | None:
        """At most, of the GPUs alone."""
        return None if self.gpu.watts is None else self.gpu.watts * self.gpus

    def joules_per_token(self, traffic: Traffic) -> float | None:
        """Of an answer, at full load and full draw."""
        if self.load is None or self.gpu.watts is None:
            return None
        return self.gpu.watts * self.replica.ranks.world / (self.load.requests_per_second * traffic.new)

    def percent_of_ceiling(self, traffic: Traffic) -> float | None:
        """Of what the data sheet would allow in the same load; several GPUs without talking to each other."""
        if self.load is None:
            return None
        best = self.replica.ceiling.answer_tokens_per_second(self.load.batch, traffic.prompt, traffic.new)
        return 100 * self.load.requests_per_second * traffic.new / best

    def to_dict(self, traffic: Traffic, price: float | None) -> dict[str, Any]:
        joules, cost = self.joules_per_token(traffic), None if price is None else self.cost_per_day(price)
        found = self.load is not None
        return {
            "gpu": self.gpu.name,
            "format": self.format,
            "gpus": self.gpus if found else None,
            "gpus_per_replica": self.replica.ranks.world,
            "link": self.replica.link.name if self.replica.ranks.world > 1 else None,
            "load_of_a_replica": asdict(self.load) if self.load else None,
            "limited_by": self.limit,
            "cost_per_day": cost if found else None,
            "cost_per_request": cost / traffic.requests_per_day if found and cost is not None else None,
            "watts_at_most": self.watts if found else None,
            "kwh_per_million_tokens": None if joules is None else joules / 3.6,
            "percent_of_ceiling": self.percent_of_ceiling(traffic),
            "evidence": self.evidence.to_dict(),
        }


@dataclass(frozen=True)
class TrafficPlan:
    """The whole answer."""

    model: PlannedModel
    decoder: Decoder
    traffic: Traffic
    question: Question
    fleets: tuple[Fleet, ...]  # bf16 first of every GPU
    refused: tuple[str, ...]  # recipes, with the reason

    def of_gpu(self, gpu: str) -> tuple[Fleet, ...]:
        return tuple(fleet for fleet in self.fleets if fleet.gpu.name == gpu)


def plan_traffic(
    model: PlannedModel, recipes: Sequence[Recipe], gpus: Sequence[Gpu], question: Question, traffic: Traffic,
    link: Link | None = None, share: float | None = None,
) -> TrafficPlan:  # fmt: skip
    """For every GPU and format; `share` of the ceilings instead of what was measured."""
    if model.decoder is None:
        raise InputError(model.remark)
    formats, refused = [keep(model.decoder)], []
    for recipe in recipes:
        try:
            formats.append(choose(model, recipe))
        except InputError as error:
            refused.append(f"{recipe.name} is left out: {error}")
    asked = replace(question, context=traffic.prompt + traffic.new, answer=traffic.new)
    fleets, kept = [], {chosen.name: chosen for chosen in formats}
    for gpu in gpus:
        for chosen in formats:
            try:
                replicas = list(replicas_of(model.decoder, chosen, gpu, asked, link, share))
            except InputError as error:  # a format that does not hold one of the layers
                refused.extend([f"{chosen.name} is left out: {error}"] if kept.pop(chosen.name, None) else [])
                continue
            fleets.append(fleet_of(chosen.name, replicas, traffic))
    return TrafficPlan(model, model.decoder, traffic, asked, tuple(fleets), tuple(refused))


def fleet_of(name: str, replicas: Sequence[Replica], traffic: Traffic) -> Fleet:
    """Of the replica that takes the fewest GPUs, the smallest one of equals."""
    fleets = []
    for replica in replicas:
        load, limit = replica.most(traffic)
        count = math.ceil(traffic.peak_rate / load.requests_per_second) if load else 0
        evidence = evidence_for(replica.efficiency, replica.ceiling)
        if replica.ranks.world > 1 and evidence.measured:
            evidence = replace(evidence, measured=False, words=f"assumed over several GPUs; of one {evidence.words}")
        fleets.append(Fleet(replica.ceiling.gpu, name, replica, load, limit, count, evidence))
    able = [fleet for fleet in fleets if fleet.load is not None]
    if able:
        return min(able, key=lambda fleet: (fleet.gpus, fleet.replica.ranks.world))
    return next((fleet for fleet in fleets if fleet.limit != "does not fit"), fleets[-1])


def replicas_of(
    decoder: Decoder, chosen: Chosen, gpu: Gpu, question: Question, link: Link | None, share: float | None
) -> Iterator[Replica]:
    """One GPU, and as many of TENSORS as the model can be cut for; InputError where one GPU cannot hold the format."""
    fitted = Efficiency({}, share=share) if share else efficiency_on(gpu, routed=bool(decoder.experts))
    for tensor in TENSORS:
        ranks = Ranks(tensor, experts=decoder.config.has_experts and tensor > 1)
        try:
            check_parallel(decoder.config, None, ranks)
            (stage,) = spread(decoder, chosen, ranks, gpu, question).stages
        except InputError:
            if tensor == 1:
                raise
            continue
        yield Replica(ranks, stage, fitted, link or usual_link(gpu))


def _missed(load: Load, traffic: Traffic) -> str:
    """The goal that a load misses; empty where it keeps both."""
    if traffic.ttft is not None and load.first_token > traffic.ttft:
        return "--ttft"
    return "--tpot" if traffic.tpot is not None and load.between_tokens > traffic.tpot else ""
