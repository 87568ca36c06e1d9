"""A server with scripted answers, for the tests of `quantkit bench serve`; and what all tests of measuring share."""

import asyncio
import gc
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="session", autouse=True)
def _little_to_collect() -> Iterator[None]:
    """Measurements collect garbage before the clock starts: half a second where torch and transformers are imported.

    What is there now is left out of later collections; it stays until the process ends anyway.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: object) -> bytes:
    return chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


def refusal(status: int, message: str) -> bytes:
    body = json.dumps({"error": {"message": message}}).encode()
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def full_answer(request: dict[str, Any]) -> list[Any]:
    """As many tokens as asked for, usage, the end; in pieces that end at odd places."""
    count = request["max_tokens"]
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count}}
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    words = b"".join(
        event({"choices": [{"delta": {"content": f"w{number}"}, "finish_reason": None}]}) for number in range(count)
    )
    data = STREAM + role + words + event({"choices": [{"delta": {}, "finish_reason": "length"}]}) + event(usage)
    data += chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return [data[:7], 0.0, *(data[start : start + 101] for start in range(7, len(data), 101))]


class ScriptedServer:
    """Answers each chat or completion with a script: bytes to write, seconds to wait, None to cut the connection."""

    def __init__(self) -> None:
        self.script: Callable[[dict[str, Any]], list[Any]] = self.full_answer
        self.other: dict[str, bytes] = {"/v1/models": json.dumps({"data": [{"id": "scripted"}]}).encode()}
        self.requests: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.connections = self.open = self.most_open = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    full_answer = staticmethod(full_answer)
    refusal = staticmethod(refusal)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"Content-Length: (\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        path = head.split()[1]
        if not path.endswith("completions"):
            found = self.other.get(path)
            found_head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
            writer.write(refusal(404, "no") if found is None else found_head % len(found) + found)
            return True
        self.heads.append(head)
        self.requests.append(json.loads(body))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._follow(self.script(self.requests[-1]), writer)
        finally:
            self.open -= 1

    async def _follow(self, script: list[Any], writer: asyncio.StreamWriter) -> bool:
        for step in script:
            if step is None:
                await asyncio.sleep(0.02)  # what was written arrives first
                return False
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            else:
                await asyncio.sleep(step)
        return True

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.sleep(0.01)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    started = ScriptedServer()
    yield started
    started.close()
