"""Decoding alone: from the moment when everybody has a first token until the first one ends.

Prompts are not in the time, and neither is the end, where those whose guesses were wrong decode in a smaller batch: a
server has somebody else for the free place.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quantkit.eval.engine.guesses import Guesses
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.engine.engine import Engine

Run = Callable[[], "Decoded"]


@dataclass(frozen=True)
class Decoded:
    """What one engine did in that time."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0  # that brought tokens
    guesses: Guesses = field(default_factory=Guesses)

    def __add__(self, other: Decoded) -> Decoded:
        return Decoded(
            self.seconds + other.seconds,
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.guesses + other.guesses,
        )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / self.steps


@dataclass(frozen=True)
class Rounds:
    """The same thing measured several times: the median counts, the spread shows how quiet the machine was."""

    runs: tuple[Decoded, ...]

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(run.tokens_per_second for run in self.runs)

    @property
    def step_ms(self) -> float:
        return statistics.median(run.step_ms for run in self.runs)

    @property
    def spread_percent(self) -> float:
        """From the slowest to the fastest round, in percent of the median."""
        speeds = [run.tokens_per_second for run in self.runs]
        return 100 * (max(speeds) - min(speeds)) / self.tokens_per_second

    @property
    def guesses(self) -> Guesses:
        """Of all rounds together."""
        return sum((run.guesses for run in self.runs), Guesses())


def interleaved(contenders: Sequence[Run], rounds: int) -> list[Rounds]:
    """All contenders in turn, again and again, so that a slow minute hits each; a first turn is not counted."""
    for run in contenders:
        run()
    found = [[run() for run in contenders] for _ in range(rounds)]
    return [Rounds(runs) for runs in zip(*found, strict=True)]


def decode_all(engine: Engine, prompts: Sequence[list[int]], batch: int, params: SamplingParams) -> Decoded:
    """So many prompts at once, one batch after the other."""
    found = Decoded()
    for start in range(0, len(prompts), batch):
        found += decode(engine, prompts[start : start + batch], params)
    return found


def decode(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> Decoded:
    """One batch. Nothing is left of earlier runs: no prompt is found in the cache."""
    engine.forget()
    without_token = {engine.add(prompt, params).id for prompt in prompts}
    while without_token:
        without_token -= {delta.request for delta in engine.step()}
    before, tokens, steps = Guesses.so_far(engine), 0, 0
    begin = time.perf_counter()
    ended = False
    while engine.unfinished and not ended:
        deltas = engine.step()
        tokens += len(deltas)
        steps += bool(deltas)
        ended = any(delta.finished for delta in deltas)
    seconds = time.perf_counter() - begin
    guesses = Guesses.so_far(engine) - before
    while engine.unfinished:
        engine.step()
    engine.drain()
    return Decoded(seconds, tokens, steps, guesses)
