"""The protocol of `quantkit bench batching`: every way in turn on one engine, after a part of the load as warm-up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from quantkit.errors import InputError
from quantkit.eval.batching.drive import MixedRun, PrefixRun, drive, mixed_ways, time_first_tokens
from quantkit.eval.batching.load import MixedLoad, PrefixLoad
from quantkit.progress import Progress, silent
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.pages import pages_for
from quantkit.runtime.engine.engine import Engine

_Run = TypeVar("_Run", MixedRun, PrefixRun)
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Plan:
    places: int  # of the longest context; the cache has room for so many
    load: MixedLoad
    prefixes: PrefixLoad
    rounds: int = 1

    def runs(self) -> int:
        return self.rounds * 5


@dataclass(frozen=True)
class Batching:
    """Of each way the median round."""

    plan: Plan
    mixed: tuple[MixedRun, ...]  # static, continuous, paged
    prefixes: tuple[PrefixRun, ...]  # cold, shared

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as much, or as soon: above 1 is better for the one in front."""
        static, continuous, paged = self.mixed
        cold, shared = self.prefixes
        return {
            "continuous_over_static_tokens_per_second": continuous.tokens_per_second / static.tokens_per_second,
            "static_over_continuous_steps": static.steps / continuous.steps,
            "paged_over_reserved_requests": paged.most_at_once / continuous.most_at_once,
            "paged_over_reserved_tokens_per_second": paged.tokens_per_second / continuous.tokens_per_second,
            "cold_over_shared_first_token": median_ms(cold) / median_ms(shared),
            "cold_over_shared_prompt_tokens": cold.computed / shared.computed,
        }


def median_ms(run: PrefixRun) -> float:
    return 1e3 * statistics.median(run.first_token)


def same_answers(run: _Run, other: _Run) -> int:
    return sum(one == two for one, two in zip(run.answers, other.answers, strict=True))


def cache_options(places: int, max_context: int, given: EngineOptions) -> EngineOptions:
    """An engine whose cache has room for so many of the longest contexts, and which may run many more short ones."""
    for flag, value in (("--kv-tokens", given.kv_tokens), ("--speculative", given.speculative)):
        if value is not None:
            raise InputError(
                f"{flag} is '{value}', but bench batching decodes plainly, in a cache of --batch x --max-context "
                "tokens; leave it out"
            )
    sequences = given.max_sequences or 8 * places
    if sequences < places:
        raise InputError(f"--max-sequences is {sequences}, but must be at least --batch, which is {places}")
    tokens = places * pages_for(max_context, given.page_size) * given.page_size
    more = {"max_sequences": sequences, "max_context": max_context, "kv_tokens": tokens}
    return EngineOptions(**vars(given) | more | {"warm_up": given.torch_device.type == "cuda"})


def measure(engine: Engine, plan: Plan, on_run: Progress = silent) -> Batching:
    vocab, ways = engine.config.vocab, mixed_ways(plan.places)
    prompts, new = plan.load.prompts(vocab), [one.new for one in plan.load.requests]
    _warm_up(engine, prompts[: 2 * plan.places])
    common, answers = plan.prefixes.prompts(vocab), plan.prefixes.new
    mixed = [partial(drive, engine, prompts, new, way) for way in ways]
    prefixes = [partial(time_first_tokens, engine, common, answers, shared=shared) for shared in (False, True)]
    return Batching(
        plan,
        _medians(mixed, plan, lambda run: run.seconds, on_run),
        _medians(prefixes, plan, median_ms, on_run),
    )


def _warm_up(engine: Engine, prompts: Sequence[list[int]]) -> None:
    for way in mixed_ways(max(1, len(prompts) // 2)):
        drive(engine, prompts, [_WARM_UP_TOKENS] * len(prompts), way)


def _medians(
    ways: Sequence[Callable[[], _Run]], plan: Plan, time_of: Callable[[_Run], float], on_run: Progress
) -> tuple[_Run, ...]:
    """Ways take turns, so that a slow minute hits each."""
    rounds: list[list[_Run]] = []
    for _ in range(plan.rounds):
        rounds.append([])
        for way in ways:
            rounds[-1].append(way())
            on_run("", plan.runs())
    each = (sorted(runs, key=time_of) for runs in zip(*rounds, strict=True))
    return tuple(runs[len(runs) // 2] for runs in each)
