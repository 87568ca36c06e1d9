"""Requests that are wrong, and floods of texts to tokenize: answered with what is due, or refused."""

import asyncio
import json
import time
from random import Random
from typing import Any

from soak.answers import Failure
from soak.cases import CHAT, MODEL, PLAIN
from soak.course import Course
from soak.wire import Reply, as_json_request, as_request, connection, post, send_raw

FLOOD = 24  # texts at once; the server lets 17 in
_TEXT = "The function returns a list of words. " * 3000
_RIGHT = {"model": MODEL, "prompt": "A list", "max_tokens": 2}
Wrong = tuple[bytes, int]  # a request, and the status that it must get


def _with(**fields: Any) -> Wrong:
    return as_json_request(PLAIN, _RIGHT | fields), 400


def _raw(body: bytes, path: str = PLAIN) -> Wrong:
    return as_request(path, body), 400


def wrong_requests() -> list[Wrong]:
    wrong_fields: list[dict[str, Any]] = [
        {"prompt": 5},
        {"prompt": []},
        {"prompt": [[1, 2], ["a"]]},
        {"prompt": [2**40]},
        {"prompt": [1, 2, 10**6]},
        {"prompt": "A long text. " * 2000},
        {"max_tokens": -1},
        {"max_tokens": "5"},
        {"n": 10**30},
        {"temperature": -1},
        {"top_p": 0},
        {"logprobs": 21},
        {"stop": ""},
        {"seed": 2**70},
        {"logit_bias": {"word": 1}},
        {"guided_regex": "(" * 50},
        {"guided_grammar": "no grammar"},
        {"guided_json": {"type": "nothing"}},
        {"guided_regex": "a", "guided_choice": ["b"]},
    ]
    right = json.dumps(_RIGHT).encode()
    return [
        *(_with(**fields) for fields in wrong_fields),
        *(_raw(body) for body in (b"", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"null", b'"text"')),
        *(_raw(body) for body in (b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": NaN}')),
        _raw(b'{"messages": []}', CHAT),
        _raw(b'{"messages": [{"role": "king", "content": "a"}]}', CHAT),
        _raw(b'{"tokens": [1, 99999999]}', "/detokenize"),
        (as_request("/v1/nowhere", right), 404),
        (as_json_request(PLAIN, _RIGHT | {"model": "another"}), 404),
        (as_request(PLAIN, b"", method="DELETE"), 405),
        (as_request(PLAIN, right, host="evil.example.org"), 421),
        (as_request(PLAIN, b"").replace(b"Length: 0", b"Length: 99999999"), 413),
        (b"\x00\x01\x02 no HTTP\r\n\r\n", 400),
    ]


async def send_wrong_bodies(course: Course, random: Random) -> None:
    wrong = wrong_requests()
    while course.going:
        request, due = random.choice(wrong)
        since = time.monotonic()
        course.report.requests["wrong bodies"] += 1
        try:
            reply = await send_raw(course.port, request)
        except OSError as error:
            course.report.fault(f"wrong bodies: {request[:300]!r} ended with {error!r}")
            continue
        if reply.status in (429, 503):  # the queue, or the engine, is asked first
            course.note_failure("wrong bodies", Failure(reply.status, reply.code), since)
        elif reply.status != due:
            course.report.fault(f"wrong bodies: {request[:300]!r} got {reply}")
        else:
            course.report.refused["wrong bodies"] += 1
        await _send_half(course, random)
        await asyncio.sleep(0.3 * random.random())


async def _send_half(course: Course, random: Random) -> None:
    """A request whose end never comes."""
    request = as_json_request(PLAIN, _RIGHT)
    async with connection(course.port) as (_, writer):
        writer.write(request[: random.randrange(len(request))])
        await asyncio.sleep(0.1 * random.random())
    course.report.requests["half requests"] += 1


async def flood_tokenizer(course: Course, random: Random) -> None:
    count = await _count(course.port)
    while course.going:
        replies = await asyncio.gather(*(_tokenize(course, random) for _ in range(FLOOD)))
        course.report.requests["tokenizer floods"] += FLOOD
        for reply in filter(None, replies):
            if reply.status == 200 and reply.json["count"] == count:
                course.report.checked["tokens"] += 1
            elif reply.status == 429 and reply.code == "queue_full":
                course.report.refused["tokenizer floods"] += 1
            else:
                course.report.fault(f"tokenizer floods: {reply.status} {reply.body[:200]!r}")
        await asyncio.sleep(2 + 6 * random.random())


async def _count(port: int) -> int:
    return int((await post(port, "/tokenize", {"prompt": _TEXT})).json["count"])


async def _tokenize(course: Course, random: Random) -> Reply | None:
    """None for one that leaves."""
    if random.random() < 0.8:
        return await post(course.port, "/tokenize", {"prompt": _TEXT})
    async with connection(course.port) as (_, writer):
        writer.write(as_json_request("/tokenize", {"prompt": _TEXT}))
        await asyncio.sleep(0.2 * random.random())
    return None
