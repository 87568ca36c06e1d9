"""What one client does is no trouble for the others: one that does not read, floods, or comes under another's name."""

import asyncio
import contextlib
import errno
import json
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.errors import InputError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.server import connections, serve
from quantkit.runtime.server.config_file import ApiKey
from quantkit.runtime.server.engine_process import process
from quantkit.runtime.server.engine_process.client import EngineClient
from quantkit.runtime.server.engine_process.pending import PendingRequest
from quantkit.runtime.server.errors import ApiError
from quantkit.runtime.server.hosts import host_name, is_loopback
from quantkit.runtime.server.routes import event_stream
from quantkit.runtime.startup import start_engine

PLAIN = "/v1/completions"
SHORT = {"model": "demo", "prompt": "A list is", "max_tokens": 2}


class Held:
    """Of a call, what a stream uses: it has a time limit, and must be closed."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.error: BaseException | None = None
        self.closed = False

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncGenerator[None, None]:
        try:
            async with asyncio.timeout(self.seconds):
                yield
        except TimeoutError:
            raise ApiError(504, "too long", code="timeout") from None

    def close(self, error: BaseException | None = None) -> None:
        self.closed, self.error = True, error


@pytest.mark.parametrize("read", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("seconds", [60.0, 0.02])
def test_a_client_that_stops_reading_is_given_up(read: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stops: in the middle, before [DONE], before the last word, or before the error that it would get."""
    monkeypatch.setattr(event_stream, "STALLED_SECONDS", 0.1)
    taken: list[Any] = []

    async def send(message: Any) -> None:
        if len(taken) > read:  # the head is always taken
            await asyncio.Event().wait()
        taken.append(message)

    async def receive() -> Any:
        return await asyncio.Event().wait()

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        for number in range(2):
            yield {"chunk": number}
        if seconds < 1:
            await asyncio.Event().wait()  # an answer that takes longer than the limit

    async def serve() -> Held:
        call = Held(seconds)
        stream = event_stream.EventStream(call, {"first": 1}, chunks())  # type: ignore[arg-type]
        await asyncio.wait_for(stream({"type": "http", "path": "/v1/completions", "method": "POST"}, receive, send), 2)
        return call

    call = asyncio.run(serve())
    assert call.closed
    if seconds > 1:
        finished = read >= 5
        assert (call.error is None) == finished
        assert finished or getattr(call.error, "code", "") == "client_stalled"
    else:
        assert getattr(call.error, "code", "") in ("timeout", "client_stalled")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such option")
def test_connections_of_clients_that_stop_reading_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though closing them would wait until all is sent."""
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.5)
    with serve._bind("127.0.0.1", 0) as listener, socket.socket() as client:
        listener.listen()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(listener.getsockname())
        with listener.accept()[0] as connection:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    connection.send(bytes(1 << 16))
            watched = select.poll()
            watched.register(connection, select.POLLERR)
            assert watched.poll(20_000)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ETIMEDOUT


def test_a_flood_of_texts_to_tokenize_stops_nobody(live_server: Any) -> None:
    """Some of them are refused; a prompt is answered meanwhile."""
    text = "The function returns a list of words. " * 6000
    with ThreadPoolExecutor(40) as threads:
        flood = [threads.submit(live_server.ask, "POST", "/tokenize", {"prompt": text}) for _ in range(40)]
        time.sleep(0.2)
        assert live_server.ask("POST", PLAIN, SHORT).status == 200
        replies = [one.result() for one in flood]
    assert {reply.status for reply in replies} == {200, 429}
    refused = next(reply for reply in replies if reply.status == 429)
    assert refused.error["code"] == "queue_full"
    assert live_server.ask("POST", "/detokenize", {"tokens": [5, 6]}).status == 200


# Names of the host


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("me.localhost", 200),
        ("evil.example.org", 421),
        ("evil.example.org:8000", 421),
        ("192.168.1.7", 421),
        ("localhost.evil.example.org", 421),
    ],
)
def test_a_server_without_keys_answers_to_names_of_this_machine(live_server: Any, host: str, status: int) -> None:
    for method, path, body in (("GET", "/v1/models", None), ("POST", PLAIN, SHORT), ("GET", "/metrics", None)):
        reply = live_server.ask(method, path, body, Host=host)
        assert reply.status == status
        assert status == 200 or "localhost only" in reply.error["message"]


def test_other_names_where_they_are_allowed_or_keys_are_asked_for(start_server: Callable[..., Any]) -> None:
    proxied = start_server(allowed_hosts=["chat.example.org"])
    assert proxied.ask("GET", "/v1/models", Host="chat.example.org").status == 200
    assert proxied.ask("GET", "/v1/models", Host="evil.example.org").status == 421
    assert start_server(allowed_hosts=["*"]).ask("GET", "/v1/models", Host="any.example.org").status == 200
    keyed = start_server(api_keys=(ApiKey.of("tester", "a-key-0123456789"),))
    assert keyed.ask("GET", "/v1/models", Host="any.example.org").status == 401


@pytest.mark.parametrize(
    ("header", "name", "here"),
    [
        ("Example.ORG:80", "example.org", False),
        ("127.0.0.2", "127.0.0.2", True),
        ("[::1]", "::1", True),
        ("[2001:db8::1]:8000", "2001:db8::1", False),
        ("", "", False),
        ("localhost:http", "localhost:http", False),
    ],
)
def test_names_of_hosts(header: str, name: str, here: bool) -> None:
    assert host_name(header) == name
    assert is_loopback(name) == here


def test_bodies_for_paths_without_a_key_are_not_read(live_server: Any) -> None:
    half = b'{"text": "\\ud800"}'  # which is refused where bodies are looked at
    assert live_server.ask("POST", PLAIN, half).error["code"] == "invalid_json"
    assert live_server.ask("POST", "/nowhere", half).status == 404
    assert live_server.ask("POST", "/health", b"[" * 100_000).status == 405


# Log-probabilities of long prompts


def test_log_probabilities_of_a_prompt_come_in_parts(
    family_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PROMPT_PART", 7)
    engine = start_engine(family_model("llama"), EngineOptions(device="cpu", max_context=64))
    outbox: queue.Queue[Any] = queue.Queue()
    loop = process.EngineLoop(engine, "tiny", outbox)
    params = {"max_tokens": 1, "logit_bias": (), "prompt_logprobs": 2}
    loop._add({"id": 3, "prompt": list(range(5, 30)), "params": params, "priority": 0, "guide": None})
    while engine.busy:
        loop._step()
    client = EngineClient("tiny", {})
    pending = client._open[3] = PendingRequest(client, 3, 1)
    parts = 0
    while not outbox.empty():
        message = json.loads(json.dumps(outbox.get()))
        parts += "prompt_logprobs" in message
        client._take(message)
    assert parts == 4
    assert len(pending.prompt_logprobs) == len(pending.prompt_top_logprobs) == 25
    assert pending.prompt_logprobs[0] is None
    assert all(len(row) == 2 for row in pending.prompt_top_logprobs[1:])


# Grammars


class Anything:
    """A guide that allows all."""

    finished = False

    def advance(self, token: int) -> None: ...

    def mask(self) -> torch.Tensor:
        return torch.ones(112, dtype=torch.bool)


def test_a_grammar_is_compiled_beside_the_steps(
    family_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are answered meanwhile; one that is aborted before its grammar is ready is never begun."""
    engine = start_engine(family_model("llama"), EngineOptions(device="cpu", max_context=64))
    outbox: queue.Queue[Any] = queue.Queue()
    loop, ready = process.EngineLoop(engine, "tiny", outbox), threading.Event()

    def compile_slowly(spec: Any, count: int) -> list[Any]:
        ready.wait(10)
        if spec["text"] == "wrong":
            raise InputError("the regex cannot be used")
        return [Anything()] * count

    monkeypatch.setattr(loop, "_guides", compile_slowly)
    params = {"n": 1, "max_tokens": 3, "ignore_eos": True, "logit_bias": ()}
    wanted = {"prompt": [5, 6, 7], "params": params, "priority": 0}
    for name, text in ((1, "right"), (2, "wrong"), (3, "aborted")):
        loop._take({"add": wanted | {"id": name, "guide": {"kind": "regex", "text": text}}})
    loop._take({"add": wanted | {"id": 4, "guide": None}})
    while engine.busy:
        loop._step()
    assert {row[0] for message in drained(outbox) for row in message.get("outputs", ())} == {4}
    loop._take({"abort": 3, "index": None})
    ready.set()
    for _ in range(3):
        loop._take(loop._inbox.get(timeout=10))
    while engine.busy:
        loop._step()
    told = list(drained(outbox))
    assert [message["refused"] for message in told if "refused" in message] == [2]
    assert {row[0] for message in told for row in message.get("outputs", ())} == {1}


def drained(outbox: "queue.Queue[Any]") -> list[Any]:
    return [outbox.get() for _ in range(outbox.qsize())]
