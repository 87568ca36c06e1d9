"""Everything that harms a server, at once: answers that were promised come, and at the end nothing is left over.

Honest clients, and among them clients that leave, stop reading, abort grammars, flood the tokenizer and send nonsense,
while the engine process is killed, stopped and held up, and a small cache makes answers give way to each other. Every
answer is compared with that of its request alone on a server without any of this. The parts are in
`tests/support/soak`.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from soak.aftermath import Before, count_leaks, fill_queues, read_log, wait_until_idle
from soak.answers import Answer
from soak.cases import Case, promised_cases
from soak.course import Course, read_metrics
from soak.honest import ask_alone, ask_honestly, check
from soak.leaving import abort_grammars, leave_answers
from soak.report import Report
from soak.stalling import stop_reading
from soak.villain import Villain
from soak.vitals import Vitals, is_alive, living_children
from soak.wrong import flood_tokenizer, send_wrong_bodies

pytestmark = pytest.mark.long

SECONDS = float(os.environ.get("QUANTKIT_TEST_SOAK_SECONDS", "360"))
AT_ONCE, WAITING = 8, 30  # answers
LIMITS = ("--max-context", "384", "--max-sequences", str(AT_ONCE), "--max-queue", str(WAITING))
PRESSURE = ("--kv-tokens", "400", "--swap-gib", "0.002", "--speculative", "draft=demo-draft,k=4")
CLIENTS: list[tuple[Callable[[Course, Random], Awaitable[None]], int]] = [
    (ask_honestly, 16),
    (leave_answers, 2),
    (abort_grammars, 2),
    (stop_reading, 4),
    (send_wrong_bodies, 1),
    (flood_tokenizer, 1),
]
COUNTED = {  # of /metrics
    "num_preemptions_total": "answers that gave way",
    "spec_decode_num_draft_tokens_total": "guessed tokens",
    "spec_decode_num_accepted_tokens_total": "right guesses",
    "prefix_cache_hits_total": "prompt tokens found in the cache",
    "generation_tokens_total": "new tokens",
    "engine_restarts_total": "restarts",
}


async def everybody(course: Course, villain: Villain, server: int, before: Before) -> None:
    """All at once, until the last one has come to its end."""
    first = await read_metrics(course.port)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch(course, server, before))
        tasks = [group.create_task(villain.run())]
        kinds = [kind for kind, count in CLIENTS for _ in range(count)]
        tasks += [group.create_task(as_task(kind(course, Random(seed)))) for seed, kind in enumerate(kinds)]
        await asyncio.wait(tasks)
        watching.cancel()
    last = await read_metrics(course.port)
    course.report.counters |= {told: last[name] - first[name] for name, told in COUNTED.items()}
    course.report.counters["seconds without an engine"] = round(course.seconds_without_engine)


async def as_task(work: Awaitable[None]) -> None:
    await work


async def watch(course: Course, server: int, before: Before) -> None:
    """In the first third, the server may grow. Counters of an engine that dies are kept by being read often."""
    began = time.monotonic()
    while True:
        if time.monotonic() < began + SECONDS / 3:
            before.grow_up(Vitals.of(server))
        await read_metrics(course.port)
        await asyncio.sleep(0.5)


async def check_alone(course: Course, when: str, *, streamed: bool) -> None:
    """Every promised answer, one at a time."""
    found = await ask_alone(course.port, course.cases, streamed=streamed)
    for case in course.cases:
        check(course, case, found[case.name], when)


async def soak(course: Course, server: int) -> set[int]:
    """The engines that there were."""
    await check_alone(course, "alone, before", streamed=True)
    await wait_until_idle(course)
    before = Before.of(server)
    course.end = time.monotonic() + SECONDS
    villain = Villain(course, server, Random(0))
    await everybody(course, villain, server, before)
    await wait_until_idle(course)
    await fill_queues(course, AT_ONCE + WAITING)
    await check_alone(course, "alone, after", streamed=False)
    await wait_until_idle(course)
    await count_leaks(course, server, before)
    return villain.victims | set(living_children(server))


def stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=60)


def answers_alone(
    start_server: Callable[..., tuple[subprocess.Popen[str], int]], cases: list[Case]
) -> dict[str, Answer]:
    """Of a server that guesses nothing, shares nothing and has all the room it likes."""
    process, port = start_server(*LIMITS, "--no-share-prefixes", "--log-level", "error")
    found = asyncio.run(ask_alone(port, cases, streamed=False))
    assert stop(process) == 0
    return found


def check_that_it_happened(report: Report) -> None:
    """Or leaks of nothing would be none. What takes half a minute or more need not fit into a short run."""
    minutes = SECONDS / 60
    kinds = ("streams", "whole answers", "leave", "abort grammars", "wrong bodies", "half requests", "tokenizer floods")
    assert all(report.requests[kind] > 3 * minutes for kind in kinds)
    assert report.checked["streams"] > 10 * minutes
    assert report.checked["whole answers"] > 10 * minutes
    assert report.checked["tokens"] > 10 * minutes
    assert report.refused["tokenizer floods"] > 0
    assert sum(report.given_up.values()) > minutes
    assert report.counters["answers that gave way"] > 10 * minutes
    assert report.counters["right guesses"] > 0
    assert report.deeds["killed"] > max(0, minutes / 3 - 1)
    assert report.counters["restarts"] == report.deeds["killed"] + report.deeds["stopped"]
    if minutes >= 4:
        assert all(report.deeds[deed] for deed in ("stopped", "held up", "killed while it loads"))
        assert all(report.given_up[client] for client in ("stop reading a stream", "stop reading tokens"))
        assert report.refused["503"] > 0
        assert sum(report.broken.values()) > 0


def test_soak(start_server: Callable[..., tuple[subprocess.Popen[str], int]], tmp_path: Path) -> None:
    cases, report, log = promised_cases(), Report(SECONDS), tmp_path / "server.log"
    expected = answers_alone(start_server, cases)
    process, port = start_server(*LIMITS, *PRESSURE, "--log-level", "warning", log=log)
    course = Course(port, cases, expected, 0.0, report)
    try:
        engines = asyncio.run(soak(course, process.pid))
        assert stop(process) == 0
        report.leaks["engines that outlive the server"] = sum(map(is_alive, engines))
        read_log(course, log)
    finally:
        report.publish()
    assert not report.faults
    assert not any(report.leaks.values()), report.leaks
    check_that_it_happened(report)
