"""What everybody in a soak shares: where the server is, what it promised, when it may fail, and the report."""

import asyncio
import re
import time
from dataclasses import dataclass, field

from soak.answers import Answer, Failure
from soak.cases import Case
from soak.report import Report
from soak.wire import get

_COUNTER = re.compile(r"^quantkit:(\w+)\{[^}]*\} (\S+)$", re.MULTILINE)
READY_SECONDS = 180.0  # for an engine to start on a busy machine


@dataclass
class Outage:
    began: float
    ended: float | None = None


@dataclass
class Course:
    """Clients go on until `end`."""

    port: int
    cases: list[Case]
    expected: dict[str, Answer]  # by the case's name
    end: float
    report: Report
    outages: list[Outage] = field(default_factory=list)

    @property
    def going(self) -> bool:
        return time.monotonic() < self.end

    def note_failure(self, client: str, failure: Failure, since: float) -> None:
        """Refused where the queue is full, or where there is no engine; an answer may break only with its engine.
        `since` is when it was asked for."""
        outage = next((one for one in self.outages if one.ended is None or one.ended >= since), None)
        if failure.status == 429 and failure.code == "queue_full":
            self.report.refused["429"] += 1
        elif failure.code != "engine_unavailable" or outage is None:
            self.report.fault(f"{client}: {failure} though the engine was well")
        elif failure.status == 503 and since >= outage.began:
            self.report.refused["503"] += 1
        else:
            self.report.broken[client] += 1

    @property
    def seconds_without_engine(self) -> float:
        return sum((outage.ended or time.monotonic()) - outage.began for outage in self.outages)


async def wait_until_ready(port: int) -> None:
    end = time.monotonic() + READY_SECONDS
    while (await get(port, "/ready")).status != 200:
        assert time.monotonic() < end, "no engine after a long time"
        await asyncio.sleep(0.1)


async def read_metrics(port: int) -> dict[str, float]:
    """Numbers of /metrics that have no label but the model's."""
    text = (await get(port, "/metrics")).body.decode()
    return {name: float(value) for name, value in _COUNTER.findall(text)}
