"""Clients that want their answer, and check it."""

import asyncio
import time
from random import Random

from soak.answers import Answer, ask_streamed, ask_whole, same
from soak.cases import Case
from soak.course import Course

PATIENCE = 240.0  # seconds for one answer; an engine that is stopped costs half a minute
_PAUSE = 1.0  # seconds after a refusal


async def ask_honestly(course: Course, random: Random) -> None:
    while course.going:
        case, streamed = random.choice(course.cases), random.random() < 0.6
        if not await _ask(course, case, streamed):
            await asyncio.sleep(_PAUSE * (1 + random.random()))


async def _ask(course: Course, case: Case, streamed: bool) -> bool:
    """Whether there was an answer."""
    since, client = time.monotonic(), "streams" if streamed else "whole answers"
    course.report.requests[client] += 1
    try:
        async with asyncio.timeout(PATIENCE):
            found = await (ask_streamed if streamed else ask_whole)(course.port, case)
    except (OSError, TimeoutError) as error:
        course.report.fault(f"{client}: '{case.name}' ended with {error!r}")
        return False
    if not isinstance(found, Answer):
        course.note_failure(client, found, since)
        return False
    check(course, case, found, client)
    return True


def check(course: Course, case: Case, found: Answer, when: str) -> None:
    if same(found, course.expected[case.name]):
        course.report.checked[when] += 1
    else:
        course.report.fault(f"'{case.name}' ({when}): {found} instead of {course.expected[case.name]}")


async def ask_alone(port: int, cases: list[Case], *, streamed: bool) -> dict[str, Answer]:
    """The answers of one request at a time, by the case's name."""
    answers = {}
    for case in cases:
        found = await (ask_streamed if streamed else ask_whole)(port, case)
        assert isinstance(found, Answer), f"{case.name}: {found}"
        answers[case.name] = found
    return answers
