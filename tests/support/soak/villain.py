"""Who kills the engine process, stops it, or holds it up for a moment."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from random import Random

from soak.course import READY_SECONDS, Course, Outage, read_metrics, wait_until_ready
from soak.vitals import is_alive, living_children

_SHORTEST, _LONGEST = 12.0, 32.0  # seconds between two deeds


class Villain:
    def __init__(self, course: Course, server: int, random: Random) -> None:
        """`server` is the id of its process."""
        self._course = course
        self._server = server
        self._random = random
        self.victims: set[int] = set()

    async def run(self) -> None:
        """Waits for an engine after every deed, also the last one."""
        try:
            for deed in cycle((self._kill, self._hold_up, self._stop, self._kill_twice)):
                gap = self._random.uniform(_SHORTEST, _LONGEST)
                await asyncio.sleep(min(gap, self._course.report.seconds / 4))
                if not self._course.going:
                    return
                await deed()
        finally:
            for victim in filter(is_alive, self.victims):  # a stopped one would outlive its server
                os.kill(victim, signal.SIGCONT)

    async def _kill(self) -> None:
        async with self._outage():
            self._signal(signal.SIGKILL)
        self._course.report.deeds["killed"] += 1

    async def _kill_twice(self) -> None:
        """Again while it loads the model."""
        async with self._outage():
            self._signal(signal.SIGKILL)
            while not set(living_children(self._server)) - self.victims:
                await asyncio.sleep(0.1)
            await asyncio.sleep(2 * self._random.random())
            self._signal(signal.SIGKILL)
        self._course.report.deeds["killed"] += 1
        self._course.report.deeds["killed while it loads"] += 1

    async def _stop(self) -> None:
        """For ever: the server must notice, and kill it."""
        async with self._outage():
            self._signal(signal.SIGSTOP)
        self._course.report.deeds["stopped"] += 1

    async def _hold_up(self) -> None:
        """So briefly that everybody still gets an answer."""
        self._signal(signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(1, 5))
        self._signal(signal.SIGCONT)
        self._course.report.deeds["held up"] += 1

    def _signal(self, number: signal.Signals) -> None:
        engine = living_children(self._server)[-1]
        self.victims.add(engine)
        os.kill(engine, number)

    @asynccontextmanager
    async def _outage(self) -> AsyncIterator[None]:
        """From before the deed until another engine is ready."""
        outage, before = Outage(time.monotonic()), await self._restarts()
        self._course.outages.append(outage)
        yield
        while await self._restarts() == before:
            assert time.monotonic() < outage.began + READY_SECONDS, "nobody noticed that the engine is gone"
            await asyncio.sleep(0.1)
        await wait_until_ready(self._course.port)
        outage.ended = time.monotonic()

    async def _restarts(self) -> float:
        return (await read_metrics(self._course.port))["engine_restarts_total"]
