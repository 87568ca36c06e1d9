"""Clients that leave: amid an answer, or while their grammar is compiled."""

import asyncio
import time
from random import Random
from typing import Any

from soak.answers import Failure
from soak.cases import MODEL, PLAIN
from soak.course import Course
from soak.wire import Reply, as_json_request, connection, events, read_status

PATIENCE = 240.0


async def leave_answers(course: Course, random: Random) -> None:
    while course.going:
        case = random.choice(course.cases)
        await _leave(course, random, "leave", case.path, case.body)
        await asyncio.sleep(random.random())


async def abort_grammars(course: Course, random: Random) -> None:
    while course.going:
        body = {"model": MODEL, "prompt": "As JSON:", "max_tokens": 200, "n": random.randint(1, 3), "temperature": 1}
        await _leave(course, random, "abort grammars", PLAIN, body | {"guided_json": _unseen_schema(random)})
        await asyncio.sleep(random.random())


def _unseen_schema(random: Random) -> dict[str, Any]:
    """One that must be compiled: nobody asked for it before."""
    names = [f"field_{random.getrandbits(40):x}" for _ in range(random.randint(5, 120))]
    fields = {name: {"type": random.choice(("string", "integer", "boolean"))} for name in names}
    things = {"type": "array", "items": {"type": "object", "properties": fields, "required": names}, "minItems": 2}
    return {"type": "object", "properties": {"things": things}, "required": ["things"]}


async def _leave(course: Course, random: Random, client: str, path: str, body: dict[str, Any]) -> None:
    since = time.monotonic()
    course.report.requests[client] += 1
    try:
        async with asyncio.timeout(PATIENCE), connection(course.port) as (reader, writer):
            writer.write(as_json_request(path, body | {"stream": True}))
            if random.random() < 0.4:
                await asyncio.sleep(0.3 * random.random())
            else:
                failure = await _read_some(reader, random.randint(1, 12))
                if failure is not None:
                    course.note_failure(client, failure, since)
            if random.random() < 0.5:
                writer.transport.abort()
    except (OSError, TimeoutError) as error:
        course.report.fault(f"{client}: ended with {error!r}")


async def _read_some(reader: asyncio.StreamReader, most: int) -> Failure | None:
    """So many events, or all there are."""
    status = await read_status(reader)
    if status != 200:
        return Failure(status, Reply(status, await reader.read()).code)
    count = 0
    async for event in events(reader):
        if "error" in event:
            return Failure(status, event["error"]["code"])
        count += 1
        if count == most:
            break
    return None
