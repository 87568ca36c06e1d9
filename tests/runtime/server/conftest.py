"""Real servers with a bundled model, on free ports: one event loop in a thread, real engine processes; or, for what
concerns the whole program, `quantkit serve` as a process.

Servers that differ only in what the API does (keys, limits, names) share an engine; other engine options start another.
"""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import IO, Any

import openai
import pytest
import uvicorn
from fastapi import FastAPI

from fake_nvml import FakeNvml
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.runtime.server.app import create_app_of
from quantkit.runtime.server.engine_process.client import EngineClient, EngineStats
from quantkit.runtime.server.gpu_metrics import GpuWatch
from quantkit.runtime.server.models.served_model import make_served_model
from quantkit.runtime.server.settings import ServerSettings
from quantkit.runtime.server.tracing import RequestTraces
from quantkit.sources import model_folder

SMALL: dict[str, Any] = {"model": "demo-draft", "served_model_name": ["demo"], "device": "cpu"}
SMALL |= {"max_context": 512, "kv_tokens": 4096}
KEY = "test-key-0123456789"
PATIENCE = 60.0  # seconds; a busy machine with two cores loads slowly


@pytest.hookimpl(tryfirst=True)  # before tests without a group get one for their file
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of live servers run in one process, which has one engine for each set of options."""
    for item in items:
        if "start_server" in getattr(item, "fixturenames", ()) and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("server"))


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

    def wait_until_idle(self) -> None:
        """Every place in the queue given back, too: the engine's numbers may be older than the last request."""
        queues = [model.queue for model in self.app.state.models.each]
        self.wait_until(lambda stats: stats.running == stats.waiting == sum(queue.taken for queue in queues) == 0)


class _Thread:
    """An event loop with engines and servers in it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._engines: dict[str, EngineClient] = {}
        self._servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
        self._tokenizer = load_tokenizer(model_folder(SMALL["model"]))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=120)

    async def start(
        self, *each: ServerSettings, gpus: FakeNvml | None = None, traces: RequestTraces | None = None
    ) -> LiveServer:
        engines = [await self._engine(settings) for settings in each]
        pairs = zip(each, engines, strict=True)
        served = [make_served_model(settings, engine, self._tokenizer) for settings, engine in pairs]
        app = create_app_of(served, gpus=None if gpus is None else GpuWatch(lambda: gpus), traces=traces)
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=3
        )
        server = uvicorn.Server(config)
        self._servers.append((server, asyncio.create_task(server.serve())))
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        return LiveServer(f"http://127.0.0.1:{port}", app, engines[0])

    async def _engine(self, settings: ServerSettings) -> EngineClient:
        wanted = repr((settings.model, settings.engine_options))
        if wanted not in self._engines:
            self._engines[wanted] = EngineClient(settings.model, settings.engine_options)
            await self._engines[wanted].start()
        return self._engines[wanted]

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
    """`start_server(**settings)`: another server, by default with the smaller bundled model under the name of the
    larger; fields of `ServerSettings` as keywords.

    `also`, of the same kind, is a second model of that server, which must have the same tokenizer; `gpus` are those
    whose numbers it shows, `traces` is told of its requests.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # engine processes inherit it; tests share the machine
    thread = _Thread()

    def start(
        also: dict[str, Any] | None = None,
        gpus: FakeNvml | None = None,
        traces: RequestTraces | None = None,
        **settings: Any,
    ) -> Any:
        each = [settings] if also is None else [settings, also]
        return thread.run(thread.start(*(ServerSettings(**SMALL | one) for one in each), gpus=gpus, traces=traces))

    yield start
    thread.close()


@pytest.fixture(scope="session")
def live_server(start_server: Callable[..., LiveServer]) -> LiveServer:
    """A server with default limits, which tests share."""
    server: LiveServer = start_server()
    return server


@dataclass
class Served:
    """A server process and what it has printed."""

    process: subprocess.Popen[str]
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    key: str = KEY
    _readers: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        for pipe, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            assert pipe is not None
            self._readers.append(threading.Thread(target=_gather, args=(pipe, lines), daemon=True))
            self._readers[-1].start()

    def wait_for(self, words: str, lines: list[str]) -> str:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = next((line for line in list(lines) if words in line), None)
            if found is not None:
                return found
            assert self.process.poll() is None, "".join(self.err)
            time.sleep(0.02)
        raise AssertionError(f"no '{words}' within {PATIENCE} s; printed: {''.join(self.err)}")

    @property
    def port(self) -> int:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.wait_for("serves", self.out))
        assert found is not None
        return int(found[1])

    @property
    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, key: str = KEY) -> tuple[int, Any, Any]:
        """(status, headers, body as text)."""
        with self.connection() as connection:
            response = self.send(connection, method, path, body, key)
            return response.status, response.headers, response.read().decode()

    def send(
        self, connection: HTTPConnection, method: str, path: str, body: dict[str, Any] | None = None, key: str = KEY
    ) -> HTTPResponse:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    @contextlib.contextmanager
    def connection(self) -> Iterator[HTTPConnection]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            yield connection
        finally:
            connection.close()

    def end(self) -> int:
        """Waits for the end, and for the last lines."""
        code = self.process.wait(timeout=PATIENCE)
        for reader in self._readers:
            reader.join(timeout=5)
        return code

    def events(self) -> list[dict[str, Any]]:
        """The lines of the log; every line must be one."""
        return [json.loads(line) for line in self.err]


def _gather(pipe: IO[str], lines: list[str]) -> None:
    with pipe:
        lines.extend(iter(pipe.readline, ""))


@contextlib.contextmanager
def _serving(*arguments: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "quantkit", "serve", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "QUANTKIT_API_KEYS": f"tester: {KEY}"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    served = Served(process)
    try:
        yield served
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        served.end()


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[Served]]:
    """`with serving("demo", "--port", "0") as served`: `quantkit serve` as a process of its own."""
    return _serving
