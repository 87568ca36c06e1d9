"""Real servers with the bundled model, on free ports: one event loop in a thread, real engine processes.

Servers that differ only in what the API does (keys, limits, names) share an engine; other engine options start another.
"""

import asyncio
import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import uvicorn
from fastapi import FastAPI

from quantkit.runtime.server.app import create_app
from quantkit.runtime.server.engine_client import EngineClient, EngineStats
from quantkit.runtime.server.settings import ServerSettings
from quantkit.runtime.startup import load_tokenizer
from quantkit.sources import model_folder

SMALL: dict[str, Any] = {"model": "demo", "device": "cpu", "max_context": 512, "kv_tokens": 4096}
KEY = "test-key-0123456789"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> Any:
        """The error, in the one shape that all of them have."""
        found = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found


@dataclass(frozen=True)
class LiveServer:
    """A server that listens. `app` and `engine` live in another thread: look, but do not touch."""

    base_url: str
    app: FastAPI
    engine: EngineClient

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": f"{self.base_url}/v1", "api_key": KEY, "max_retries": 0} | options)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> "Reply":
        """One plain HTTP request; a body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection(self.base_url.removeprefix("http://"), timeout=30)
        try:
            content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            given = {"Content-Type": "application/json"} | {key.replace("_", "-"): v for key, v in headers.items()}
            connection.request(method, path, content, given)
            response = connection.getresponse()
            return Reply(response.status, {key.lower(): v for key, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def wait_until(self, reached: Callable[[EngineStats], bool], seconds: float = 10.0) -> None:
        """Waits for the engine's numbers, which come every 100 ms."""
        end = time.monotonic() + seconds
        while not reached(self.stats):
            assert time.monotonic() < end, self.stats
            time.sleep(0.01)


class _Thread:
    """An event loop with engines and servers in it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._engines: dict[str, EngineClient] = {}
        self._servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
        self._tokenizer = load_tokenizer(model_folder("demo"))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=120)

    async def start(self, settings: ServerSettings) -> LiveServer:
        options = settings.engine_options
        engine = self._engines.get(repr(options))
        if engine is None:
            engine = self._engines[repr(options)] = EngineClient(settings.model, options)
            await engine.start()
        app = create_app(settings, engine, self._tokenizer)
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=3
        )
        server = uvicorn.Server(config)
        self._servers.append((server, asyncio.create_task(server.serve())))
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        return LiveServer(f"http://127.0.0.1:{port}", app, engine)

    async def _close(self) -> None:
        for server, _ in self._servers:
            server.should_exit = True
        await asyncio.gather(*(task for _, task in self._servers))
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    def close(self) -> None:
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., LiveServer]]:
    """`start_server(**settings)`: another server with the bundled model; fields of `ServerSettings` as keywords."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # engine processes inherit it; tests share the machine
    thread = _Thread()
    yield lambda **settings: thread.run(thread.start(ServerSettings(**SMALL | settings)))
    thread.close()


@pytest.fixture(scope="session")
def live_server(start_server: Callable[..., LiveServer]) -> LiveServer:
    """A server with default limits, which tests share."""
    server: LiveServer = start_server()
    return server
