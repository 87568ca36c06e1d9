"""One engine under one load, let in by different rules: what each costs in time, in steps and in room in the cache.

The engine, its weights and its kernels are the same for all. A rule only says when the next request may come in:

    static      a batch of N; the next one when the longest answer has ended
    continuous  N at once; whoever ends makes place for the next
    paged       all that the scheduler finds pages for

The first two are engines from before paged caches: a place is room for the longest context, next to each other and
kept until its request has ended, so N is what the cache holds of such places. The last one is this engine as it is.
Here reserving is a matter of who comes in and of what counts as taken: tokens lie in pages all the same, so that the
same kernels compute every step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quantkit.runtime.core.pages import pages_for
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.token_output import TokenOutput
from quantkit.runtime.engine.engine import Engine


@dataclass(frozen=True)
class Way:
    """When a request may come in, and what it takes of the cache."""

    name: str
    places: int | None  # requests in the engine at most; None: as many as its scheduler admits
    in_batches: bool = False  # nobody comes in before all have ended
    reserves: bool = False  # a place is kept for the longest context

    def admits(self, unfinished: int, waiting: int) -> int:
        """How many of those who wait come in now."""
        if self.in_batches and unfinished:
            return 0
        return waiting if self.places is None else min(waiting, self.places - unfinished)


def mixed_ways(places: int) -> tuple[Way, Way, Way]:
    return (
        Way("static", places, in_batches=True, reserves=True),
        Way("continuous", places, reserves=True),
        Way("paged", None),
    )


@dataclass
class CacheUse:
    """Tokens and room, added up over all steps: shares weigh every step by what it holds."""

    tokens: int = 0  # whose keys and values are kept
    taken: int = 0  # room of reserved places, or of the pages that somebody holds
    cache: int = 0  # room in all

    @property
    def filled_percent(self) -> float:
        return 100 * self.tokens / self.taken

    @property
    def cache_percent(self) -> float:
        return 100 * self.tokens / self.cache


@dataclass(frozen=True)
class MixedRun:
    """A whole load, let in one way."""

    way: Way
    seconds: float
    steps: int
    preemptions: int
    answers: tuple[tuple[int, ...], ...]  # tokens, in the order of the requests
    running: tuple[tuple[float, int], ...]  # after every step: seconds since the begin, and how many it was for
    use: CacheUse

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.answers)) / self.seconds

    @property
    def most_at_once(self) -> int:
        return max(count for _, count in self.running)

    @property
    def mean_at_once(self) -> float:
        """Of all steps."""
        return sum(count for _, count in self.running) / len(self.running)


@dataclass
class _Watch:
    """What the scheduler and its pages show after every step."""

    engine: Engine
    way: Way
    begin: float = field(default_factory=time.perf_counter)
    running: list[tuple[float, int]] = field(default_factory=list)
    use: CacheUse = field(default_factory=CacheUse)

    def see(self, places: int, outputs: Sequence[TokenOutput]) -> None:
        """`places` are taken now, where the way reserves them."""
        scheduler, page_size = self.engine.scheduler, self.engine.memory.page_size
        pool, ended = scheduler.pool, sum(output.finished is not None for output in outputs)
        self.running.append((time.perf_counter() - self.begin, len(scheduler.running) + ended))
        reserved = places * pages_for(self.engine.memory.max_context, page_size)
        self.use.tokens += sum(sequence.num_computed for sequence in scheduler.running)
        self.use.taken += page_size * (reserved if self.way.reserves else pool.usable - pool.free)
        self.use.cache += page_size * pool.usable


def drive(engine: Engine, prompts: Sequence[list[int]], new: Sequence[int], way: Way) -> MixedRun:
    """All requests, greedy and of full length, from the first to the last token; nothing is left of earlier runs."""
    engine.forget()
    watch = _Watch(engine, way)
    waiting = deque(zip(prompts, new, strict=True))
    answers: dict[int, list[int]] = {}
    batch = 0  # requests that the present batch began with
    while waiting or engine.unfinished:
        coming = way.admits(engine.unfinished, len(waiting))
        for prompt, count in (waiting.popleft() for _ in range(coming)):
            answers[engine.add(prompt, full_length(count)).id] = []
        batch = coming or batch
        outputs = engine.step()
        for output in outputs:
            assert output.token is not None, output.stop_reason
            answers[output.request].append(output.token)
        kept = batch if way.in_batches and engine.unfinished else engine.unfinished
        watch.see(kept, outputs)
    seconds = time.perf_counter() - watch.begin
    engine.drain()
    return MixedRun(
        way=way,
        seconds=seconds,
        steps=engine.steps,
        preemptions=engine.scheduler.preemptions,
        answers=tuple(map(tuple, answers.values())),
        running=tuple(watch.running),
        use=watch.use,
    )


@dataclass(frozen=True)
class PrefixRun:
    """Requests with a common beginning, one after the other."""

    shared: bool  # the beginning was found in the cache, else the cache was empty before every request
    first_token: tuple[float, ...]  # seconds
    computed: int  # prompt tokens
    answers: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        return "shared" if self.shared else "cold"


def time_first_tokens(engine: Engine, prompts: Sequence[list[int]], new: int, *, shared: bool) -> PrefixRun:
    engine.forget()
    first: list[float] = []
    answers: list[tuple[int, ...]] = []
    computed = 0
    for prompt in prompts:
        if not shared:
            engine.forget()
        before = _computed(engine)
        answer: list[int] = []
        begin = time.perf_counter()
        engine.add(prompt, full_length(new))
        while engine.unfinished:
            answer += [output.token for output in engine.step() if output.token is not None]
            if len(first) == len(answers) and answer:
                first.append(time.perf_counter() - begin)
        engine.drain()
        computed += _computed(engine) - before
        answers.append(tuple(answer))
    return PrefixRun(shared, tuple(first), computed, tuple(answers))


def _computed(engine: Engine) -> int:
    return engine.scheduler.prompt_tokens - engine.scheduler.reused_tokens


def full_length(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)
