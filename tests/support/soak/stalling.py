"""Clients that stop reading and stay: the server must let go of them, though they never do."""

import asyncio
import socket
import time
from random import Random

from soak.answers import Failure
from soak.cases import MODEL, PLAIN
from soak.course import Course
from soak.vitals import is_held
from soak.wire import Reply, as_json_request

PATIENCE = 240.0  # seconds for the beginning of an answer
LET_GO_SECONDS = 150.0  # for the server to give the connection up
_LONG_HELD = 20.0  # seconds: the server had more to send than the kernel takes
_SEGMENT = 536  # bytes: with larger ones the kernel would take megabytes for a client that reads nothing
_STREAM = {"model": MODEL, "prompt": "The sea", "max_tokens": 80, "n": 3, "temperature": 1, "ignore_eos": True}
_MUCH = {"stream": True, "logprobs": 20, "priority": -3}  # 800 bytes for each token, and soon
_TEXT = "The function returns a list of words. " * 4000


async def stop_reading(course: Course, random: Random) -> None:
    while course.going:
        if random.random() < 0.7:
            await _stop_reading(course, "stop reading a stream", as_json_request(PLAIN, _STREAM | _MUCH))
        else:
            await _stop_reading(course, "stop reading tokens", as_json_request("/tokenize", {"prompt": _TEXT}))
        await asyncio.sleep(1 + random.random())


async def _stop_reading(course: Course, client: str, request: bytes) -> None:
    course.report.requests[client] += 1
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
        loop, asked = asyncio.get_running_loop(), time.monotonic()
        await loop.sock_connect(connection, ("127.0.0.1", course.port))
        await loop.sock_sendall(connection, request)
        while not _has_begun(connection):
            if time.monotonic() > asked + PATIENCE:
                course.report.fault(f"{client}: no answer after {PATIENCE:g} s")
                return
            await asyncio.sleep(0.1)
        began, own = time.monotonic(), connection.getsockname()[1]
        while is_held(course.port, own):
            if time.monotonic() > began + LET_GO_SECONDS:
                course.report.fault(f"{client}: the connection is still open after {LET_GO_SECONDS:g} s")
                return
            await asyncio.sleep(0.5)
        if time.monotonic() > began + _LONG_HELD:
            course.report.given_up[client] += 1
        else:
            course.note_failure(client, _failure(connection.recv(4096)), asked)


def _has_begun(connection: socket.socket) -> bool:
    """Whether something of the answer has come; it stays unread."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def _failure(beginning: bytes) -> Failure:
    """Of an answer that was so short that the server was soon done with it: a refusal, or a stream that broke."""
    head, _, body = beginning.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    return Failure(status, "engine_unavailable" if status == 200 else Reply(status, body).code)
