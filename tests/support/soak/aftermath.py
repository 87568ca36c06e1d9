"""What must be as it was before: pages, room in the queues, handles, threads, children, memory, and a quiet log."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from soak.cases import MODEL, PLAIN
from soak.course import Course, read_metrics
from soak.vitals import Vitals, living_children
from soak.wire import get, post

ALLOWED_GROWTH = 32 << 20  # bytes of resident memory that are no leak: what allocators keep for the next time
TOKENIZING = 17  # requests for tokens that the server lets in (`served_model.py`)
_TEXT = "The function returns a list of words. " * 2000
EXPECTED_TROUBLES = {  # of the log
    "the engine process died; starting another one",
    "the engine hangs",
    "the engine does not start",
    "ASGI callable returned without completing response.",  # uvicorn's word for a stream that nobody reads
    "Invalid HTTP request received.",
}


@dataclass
class Before:
    """The server and its engine after a few requests, one at a time, and the most that the server had in its youth:
    pools of threads and allocators grow to a size, and keep it."""

    server: Vitals
    engine: Vitals
    youth: Vitals

    @classmethod
    def of(cls, server: int) -> "Before":
        now = Vitals.of(server)
        return cls(now, Vitals.of(living_children(server)[-1]), now)

    def grow_up(self, now: Vitals) -> None:
        threads, resident = max(now.threads, self.youth.threads), max(now.resident, self.youth.resident)
        self.youth = Vitals(self.youth.handles, threads, resident)


async def wait_until_idle(course: Course) -> None:
    """Those who left are noticed within a step or two."""
    for _ in range(300):
        live = (await get(course.port, "/page/status")).json["live"]
        if live["running"] == live["waiting"] == 0 and live["kv_percent"] == 0:
            return
        await asyncio.sleep(0.1)


async def fill_queues(course: Course, room: int) -> None:
    """As many as there is room for at once: none is refused, so nobody else holds a place."""
    short = {"model": MODEL, "prompt": "A list", "max_tokens": 8}
    prompts = [post(course.port, PLAIN, short) for _ in range(room)]
    texts = [post(course.port, "/tokenize", {"prompt": _TEXT}) for _ in range(TOKENIZING)]
    for queue, asked in (("the queue", prompts), ("the tokenizer's queue", texts)):
        replies = await asyncio.gather(*asked)
        course.report.leaks[f"places in {queue}"] = sum(reply.status == 429 for reply in replies)
        course.report.requests["at the end"] += len(replies)
        for reply in replies:
            if reply.status not in (200, 429):
                course.report.fault(f"{queue} is free, but {reply.status} {reply.body[:200]!r}")


async def count_leaks(course: Course, server: int, before: Before) -> None:
    """When everybody is gone."""
    numbers, children = await read_metrics(course.port), living_children(server)
    now, engine = Vitals.of(server), Vitals.of(children[-1])
    growth = {"server": now.resident - before.youth.resident, "engine": engine.resident - before.engine.resident}
    leaks = {
        "answers": int(numbers["num_requests_running"] + numbers["num_requests_waiting"]),
        "pages": int(numbers["kv_pages_used"]),
        "handles of the server": now.handles - before.server.handles,
        "handles of the engine": engine.handles - before.engine.handles,
        "threads of the server": now.threads - before.youth.threads,
        "threads of the engine": engine.threads - before.engine.threads,
        "children": len(children) - 1,
        "bytes of the server": growth["server"] - ALLOWED_GROWTH,
        "bytes of the engine": growth["engine"] - ALLOWED_GROWTH,
    }
    course.report.leaks |= {name: max(0, count) for name, count in leaks.items()}
    course.report.growth_mib |= {name: round(count / 2**20, 1) for name, count in growth.items()}


def read_log(course: Course, log: Path) -> None:
    """Troubles are those that were made; no error was a surprise to the server."""
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            course.report.fault(f"the log has a line that is no JSON: {line[:300]}")
            continue
        if "exception" in told or told["message"] not in EXPECTED_TROUBLES:
            course.report.fault(f"the log says: {line[:2000]}")
        course.report.log[told["message"]] += 1
