"""What one engine does with N requests at once: tokens per second, waiting times, share of the memory limit.

Protocol: N prompts of random tokens are added at the same moment, greedy, the end token ignored, so that every answer
has the full length. Output tokens per second count from that moment to the last token, prefill included. Two short runs
go before, so that kernels are compiled and graphs captured: short prompts, which all answer at once, and the prompts of
the load with two tokens each. Time to first token and the gaps between tokens are taken when the host gets the tokens.
As many as fit: N is what the cache holds at full length, so that nobody waits or gives way, and the batch is full until
the end.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.eval.engine.guesses import Guesses
from quantkit.kernels.linear.weight_only.float8 import Float8Steps
from quantkit.runtime.core.pages import pages_for
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.model.experts import GroupedMlp

SHORT_PROMPT, WARM_UP_TOKENS = 16, 4
SMALL_STEP = 4096  # tokens of prompts that an engine reads at least together, where it has so many


@dataclass(frozen=True)
class Load:
    """N requests at once. More than an engine holds wait until others end."""

    batch: int
    prompt: int
    new: int


@dataclass(frozen=True)
class EngineTimes:
    """Of one load. Times in milliseconds."""

    load: Load
    seconds: float
    first_token_ms: tuple[float, float]  # median and largest
    gap_ms: tuple[float, float, float]  # p50, p95, p99 of all gaps between tokens
    step_ms: float  # median time of a step in which everybody answered; 0 where there was none
    limit_ms: float | None  # what reading weights and cache once would take, at the measured bandwidth
    guesses: Guesses
    held: int = 0  # requests that ran at the same time, at most
    cache_used: float = 0.0  # share of the cache's pages that they held, at most
    idle: tuple[float, ...] = ()  # the share of its time that each stage was idle, where there are several

    @property
    def tokens_per_second(self) -> float:
        return self.load.batch * self.load.new / self.seconds

    @property
    def percent_of_limit(self) -> float | None:
        """None too where the cache was too small for all to answer in one step."""
        return None if self.limit_ms is None or not self.step_ms else 100 * self.limit_ms / self.step_ms


@dataclass
class _Watch:
    """When tokens arrived."""

    begin: float
    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    full_steps: list[float] = field(default_factory=list)
    held: int = 0
    pages: int = 0

    def look_at(self, engine: Engine) -> None:
        """After each step: who ended in it is gone, and was seen after the one before."""
        pool = engine.scheduler.pool
        self.held = max(self.held, len(engine.scheduler.running))
        self.pages = max(self.pages, pool.usable - pool.free)

    def see(self, requests: list[int], batch: int, previous: float) -> float:
        now = time.perf_counter()
        for request in requests:
            if request in self.last:
                self.gaps.append(now - self.last[request])
            else:
                self.first[request] = now - self.begin
            self.last[request] = now
        if len(set(requests)) == batch:  # one that guesses may bring several tokens
            self.full_steps.append(now - previous)
        return now


def measure(engine: Engine, load: Load, bandwidth: float | None, *, seed: int = 0) -> EngineTimes:
    """One load, after its warm-up. `bandwidth` is the device's, bytes a second."""
    for number, warm_up in enumerate(warm_ups(load), 1):
        run_load(engine, warm_up, seed=seed + number)
    before = Guesses.so_far(engine)
    _idle_shares(engine)
    watch = run_load(engine, load, seed=seed)
    idle = _idle_shares(engine)
    guesses = Guesses.so_far(engine) - before
    if engine.speculation.on or idle:  # a step reads more than the limit counts and brings more tokens, or has stages
        bandwidth = None
    gaps = sorted(watch.gaps or [0.0])
    firsts = sorted(watch.first.values())
    steps = torch.tensor(watch.full_steps[1:] or [0.0]) * 1e3
    return EngineTimes(
        load=load,
        seconds=max(watch.last.values()) - watch.begin,
        first_token_ms=(firsts[len(firsts) // 2] * 1e3, firsts[-1] * 1e3),
        gap_ms=(_quantile(gaps, 0.5), _quantile(gaps, 0.95), _quantile(gaps, 0.99)),
        step_ms=float(steps.median()),
        limit_ms=None if bandwidth is None else bytes_of_step(engine, load) / bandwidth * 1e3,
        guesses=guesses,
        held=watch.held,
        cache_used=watch.pages / engine.scheduler.pool.usable,
        idle=idle,
    )


def _quantile(ordered: list[float], share: float) -> float:
    """In milliseconds, of seconds in order; between two of them in proportion. As many as a thousand long answers have,
    torch takes none."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return 1e3 * (ordered[low] + (place - low) * (ordered[high] - ordered[low]))


def as_many_as_fit(engine: Engine, prompt: int, new: int) -> int:
    """Requests that the engine holds to their end: the cache has pages for all of them at full length."""
    pool = engine.scheduler.pool
    held = min(pool.usable // pages_for(prompt + new, pool.page_size), engine.options.sequences)
    if held == 0:
        raise InputError(
            f"the cache holds {engine.memory.kv_tokens:,} tokens, and a request of {prompt} + {new} needs more; "
            "use shorter ones, --kv-dtype int8, or raise --memory-share"
        )
    return held


def _idle_shares(engine: Engine) -> tuple[float, ...]:
    """Of every stage since the last call; nothing where there is one."""
    return engine.peers.idle_shares(engine.runner.part.clock.take())


def warm_ups(load: Load) -> tuple[Load, Load]:
    """What runs before a load, with prompts of its own: seeds go on from the load's. The first answers of the second go
    on until the last prompt is read, so every mixture of both has been seen."""
    steps = load.batch * load.prompt // SMALL_STEP
    short = Load(load.batch, min(SHORT_PROMPT, load.prompt), WARM_UP_TOKENS)
    return short, Load(load.batch, load.prompt, min(load.new, 2 + steps))


def random_prompts(load: Load, vocab: int, seed: int) -> list[list[int]]:
    """Token ids; the same for every engine that runs the load. Loads share none: a prompt that begins like one before
    it would be found in the cache."""
    generator = random.Random(f"{seed}: {load.batch} x ({load.prompt} + {load.new})")
    return [[generator.randrange(vocab) for _ in range(load.prompt)] for _ in range(load.batch)]


def run_load(engine: Engine, load: Load, *, seed: int = 0) -> _Watch:
    """All requests at once, until the last token."""
    params = SamplingParams(max_tokens=load.new, ignore_eos=True)
    prompts = random_prompts(load, engine.config.vocab, seed)
    watch = _Watch(time.perf_counter())
    for prompt in prompts:
        engine.add(prompt, params)
    previous = watch.begin
    while engine.unfinished:
        deltas = engine.step()
        watch.look_at(engine)
        previous = watch.see([delta.request for delta in deltas], load.batch, previous)
    engine.drain()
    return watch


def bytes_of_step(engine: Engine, load: Load) -> float:
    """Read at least once when everybody answers: all weights but the embedding, and half-grown contexts.

    Of experts those that somebody chose, where all are chosen equally often; of weights with a copy in FP8 the others.
    """
    weights: float = engine.memory.weights
    for block in engine.runner.decoder.weights.blocks:
        served = [weight for linear in block.linears for weight in linear.served]
        weights -= sum(weight.copied_bytes for weight in served if isinstance(weight, Float8Steps))
        if isinstance(block.mlp, GroupedMlp):
            weights -= block.mlp.nbytes * (1 - block.mlp.share_of_token) ** load.batch
    embedding = engine.runner.decoder.weights.embedding
    if not (engine.config.tied and isinstance(embedding, Tensor)):  # in blocks, the head has a copy of its own
        weights -= embedding.nbytes
    per_token = engine.memory.page_bytes / engine.memory.page_size
    return weights + load.batch * (load.prompt + load.new / 2) * per_token


def measure_bandwidth(device: torch.device) -> float | None:
    """Bytes a second of a large reduction, the best of several; None on a CPU."""
    if device.type != "cuda":
        return None
    data = torch.zeros(1 << 30, dtype=torch.uint8, device=device).view(torch.float32)
    best = float("inf")
    for _ in range(8):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.sum()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3)
    return (1 << 30) / best


def seconds_since_process_start() -> float | None:
    """How long this process lives; None where the system does not say."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return None
    return uptime - ticks / os.sysconf("SC_CLK_TCK")
