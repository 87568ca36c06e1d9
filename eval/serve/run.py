"""Drives one load and keeps every answer.

Nothing else happens in this process meanwhile: no progress bar (its thread would hold the interpreter while tokens
arrive), no garbage collection, and requests are written before the clock starts.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quantkit.eval.serve.answers import Answer
from quantkit.eval.serve.client import Client
from quantkit.eval.serve.loads import Load

MakeBody = Callable[[int], bytes]  # the request with this number
_PREPARED = 4096  # requests that are written beforehand; later ones are written when their turn comes


@dataclass(frozen=True)
class Measured:
    """What one load gave."""

    load: Load
    answers: tuple[Answer, ...]
    begin: float
    client_share: float  # of one processor core that this client took

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last answer."""
        return max((answer.end for answer in self.answers), default=self.begin) - self.begin


async def measure(client: Client, path: str, make_body: MakeBody, load: Load, seed: int = 0) -> Measured:
    """Sends the load and waits for the last answer."""
    expected = load.requests or load.streams
    prepared = [make_body(number) for number in range(min(expected, _PREPARED))]

    def ask(number: int) -> asyncio.Task[Answer]:
        body = prepared[number] if number < len(prepared) else make_body(number)
        return asyncio.ensure_future(client.ask(path, body))

    allow_sockets(load.streams)
    with _no_collections():
        begin, busy = time.perf_counter(), time.thread_time()
        if load.rate is None:
            answers = await _streams(ask, load, begin)
        else:
            answers = await _arrivals(ask, load, begin, seed)
        took, busy = time.perf_counter() - begin, time.thread_time() - busy
    full = begin + load.ramp_up  # from here on all streams are busy
    counted = tuple(answer for answer in answers if answer.sent >= full)
    return Measured(load, counted, full, busy / took if took else 0.0)


async def _streams(ask: Callable[[int], asyncio.Task[Answer]], load: Load, begin: float) -> list[Answer]:
    """A fixed number of streams; each asks again as soon as it is answered."""
    assert load.concurrency is not None
    numbers = iter(range(load.requests)) if load.requests is not None else _until(begin + (load.seconds or 0))
    answers: list[Answer] = []

    async def stream(place: int, streams: int) -> None:
        await asyncio.sleep(load.ramp_up * place / streams)
        for number in numbers:
            answers.append(await ask(number))

    async with asyncio.TaskGroup() as group:
        streams = min(load.concurrency, load.requests or load.concurrency)
        for place in range(streams):
            group.create_task(stream(place, streams))
    return answers


def _until(end: float) -> Iterator[int]:
    number = 0
    while time.perf_counter() < end:
        yield number
        number += 1


async def _arrivals(ask: Callable[[int], asyncio.Task[Answer]], load: Load, begin: float, seed: int) -> list[Answer]:
    """Requests at their times, whether or not earlier ones are answered."""
    tasks = []
    for number, at in enumerate(load.arrivals(seed)):
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        tasks.append(ask(number))
    return list(await asyncio.gather(*tasks))


def allow_sockets(streams: int) -> None:
    """Raises this process's limit of open files, where the system lets it, to what the load needs."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(4096, 2 * streams)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


@contextmanager
def _no_collections() -> Iterator[None]:
    """A collection stops the loop for milliseconds, which would show as a gap between tokens."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
