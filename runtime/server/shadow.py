"""Quality watch: a share of finished requests is replayed on the unquantized model, and the difference is measured.

An answer is sampled by chance when it ends. When the served engine has nothing to do, prompt and answer go through both
engines as one prompt with log-probabilities, and every answered position is compared:

    KL divergence   of the reference from what is served, over the reference's most probable tokens; all others count as
                    one token, so it is a lower bound
    top-1           how often both prefer the same token
    alarms          numbers that are not finite; answers that repeat themselves

Users come first: a replay begins only while nobody is answered, ranks behind everybody, and is dropped when too many
wait. The reference has an engine process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.runtime.core.sampling_params import MOST_LOGPROBS, SamplingParams
from quantkit.runtime.server.engine_process.client import EngineClient
from quantkit.runtime.server.engine_process.pending import PendingRequest

MOST_WAITING = 32  # answers; more are dropped
LAST_PRIORITY = 1000  # behind everybody who comes within hours
IDLE_SECONDS = 0.05  # between looks whether users are answered
WINDOW = 200  # answers that the numbers are taken from
REPEATED, LONGEST_PERIOD = 64, 16  # tokens at the end of an answer that repeat one of at most so many

Row = dict[int, float]  # token -> log-probability, of the most probable tokens at one position


@dataclass(frozen=True)
class Comparison:
    """One answer on both models."""

    positions: int
    divergence: float  # nats, the mean over positions
    agreement: float  # 0 to 1


@dataclass(frozen=True)
class ShadowNumbers:
    """What the watch has seen; means over the last answers."""

    compared: int = 0  # answers in all
    positions: int = 0  # in all
    divergence: float = 0.0
    agreement: float = 1.0
    nan_alarms: int = 0
    repetition_alarms: int = 0
    dropped: int = 0
    waiting: int = 0


class ShadowWatch:
    def __init__(self, served: EngineClient, reference: EngineClient, rate: float, *, seed: int = 0) -> None:
        """`rate` is the share of answers that are compared, 0 to 1."""
        self._served = served
        self._reference = reference
        self._rate = rate
        self._random = random.Random(seed)
        self._waiting: deque[tuple[list[int], list[int]]] = deque()
        self._wake = asyncio.Event()
        self._last: deque[Comparison] = deque(maxlen=WINDOW)
        self._numbers = ShadowNumbers()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._reference.start()
        self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._reference.close()

    def offer(self, prompt: list[int], answer: list[int]) -> None:
        """A finished answer, which may be looked at. Costs nothing but a coin toss."""
        if not answer or self._random.random() >= self._rate:
            return
        if repeats(answer):
            self._count(repetition_alarms=1)
        if len(self._waiting) >= MOST_WAITING:
            self._count(dropped=1)
            return
        self._waiting.append((prompt, answer))
        self._wake.set()

    def numbers(self) -> ShadowNumbers:
        positions = sum(one.positions for one in self._last)
        weight = max(positions, 1)
        means = {
            "divergence": sum(one.divergence * one.positions for one in self._last) / weight,
            "agreement": sum(one.agreement * one.positions for one in self._last) / weight if positions else 1.0,
        }
        return ShadowNumbers(**(asdict(self._numbers) | means | {"waiting": len(self._waiting)}))

    def _count(self, **more: int) -> None:
        now: dict[str, Any] = asdict(self._numbers)
        self._numbers = ShadowNumbers(**(now | {name: now[name] + value for name, value in more.items()}))

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            while self._waiting:
                await self._until_idle()
                prompt, answer = self._waiting.popleft()
                with contextlib.suppress(QuantkitError):  # an engine died: its supervisor starts another
                    await self._compare(prompt, answer)
            self._wake.clear()

    async def _until_idle(self) -> None:
        while self._served.open_requests or not self._served.ready or not self._reference.ready:
            await asyncio.sleep(IDLE_SECONDS)

    async def _compare(self, prompt: list[int], answer: list[int]) -> None:
        tokens = prompt + answer
        wanted = SamplingParams(max_tokens=1, prompt_logprobs=MOST_LOGPROBS)
        here, there = await asyncio.gather(
            rows_of(self._served.submit(tokens, wanted, priority=LAST_PRIORITY)),
            rows_of(self._reference.submit(tokens, wanted)),
        )
        found = compare(here[len(prompt) :], there[len(prompt) :])
        if found is None:
            self._count(nan_alarms=1)
        else:
            self._last.append(found)
            self._count(compared=1, positions=found.positions)


async def rows_of(pending: PendingRequest) -> list[Row]:
    """The most probable tokens at every position of a prompt."""
    async for _ in pending:
        pass
    return [dict(row) for row in pending.prompt_top_logprobs]


def compare(served: list[Row], reference: list[Row]) -> Comparison | None:
    """Two models on the same positions; None where a number is not finite."""
    divergence = agreed = 0.0
    for here, there in zip(served, reference, strict=True):
        numbers = [*here.values(), *there.values()]
        if not all(math.isfinite(number) for number in numbers):
            return None
        divergence += divergence_of(there, here)
        agreed += max(here, key=here.__getitem__) == max(there, key=there.__getitem__)
    count = len(served)
    return Comparison(count, divergence / max(count, 1), agreed / max(count, 1))


def divergence_of(reference: Row, served: Row) -> float:
    """KL(reference || served) in nats, over the tokens that both list; the others count as one."""
    shared = reference.keys() & served.keys()
    rest = max(1.0 - sum(math.exp(reference[token]) for token in shared), 1e-9)
    other_rest = max(1.0 - sum(math.exp(served[token]) for token in shared), 1e-9)
    inside = sum(math.exp(reference[token]) * (reference[token] - served[token]) for token in shared)
    return max(0.0, inside + rest * math.log(rest / other_rest))


def repeats(answer: list[int]) -> bool:
    """Whether the end of an answer says the same few tokens over and over."""
    tail = answer[-REPEATED:]
    if len(tail) < REPEATED:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LONGEST_PERIOD + 1))
