"""A client for one OpenAI-compatible server: many streams at once, little work for each event.

Connections are kept and used again. Each request has a time limit from sending to the last byte.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from quantkit.errors import InputError
from quantkit.eval.serve.answers import (
    CONNECT,
    DISCONNECT,
    MALFORMED,
    TIMEOUT,
    Answer,
    AnswerReader,
    Failure,
    error_message,
)
from quantkit.eval.serve.wire import Events, Response, WireError

_MOST_ERROR_BYTES = 1 << 20  # of a refusal that are kept for its message


@dataclass(frozen=True)
class Target:
    """Where a server listens."""

    host: str
    port: int
    tls: bool
    prefix: str  # of every path

    @classmethod
    def parse(cls, url: str) -> Target:
        """From `http://host:port`, with or without the `/v1` that OpenAI clients add."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise InputError(f"--url is '{url}', but must be like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class _Exchange:
    """One request's response: `on_body` gets its bytes with the time they came."""

    def __init__(self, on_body: Callable[[Response, bytes, float], None]) -> None:
        self.response = Response()
        self.begun = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_body = on_body

    def received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.begun = True
        if self.done.done():
            return
        try:
            body = self.response.feed(data)
            if body:
                self._on_body(self.response, body, now)
        except WireError as error:
            self.done.set_exception(Failure(MALFORMED, str(error)))
        except Failure as failure:
            self.done.set_exception(failure)
        else:
            if self.response.complete:
                self.done.set_result(None)

    def lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        self.response.end_of_stream()
        if self.response.complete:
            self.done.set_result(None)
        else:
            reason = str(error) if error else "the server closed the connection"
            self.done.set_exception(Failure(DISCONNECT, reason))


class _Connection(asyncio.Protocol):
    """A socket that serves one exchange after the other."""

    def __init__(self) -> None:
        self.exchange: _Exchange | None = None
        self.closed = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # other loops' transports do not inherit from it

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            self.close()  # nobody asked: what comes next would be taken for an answer
        else:
            self.exchange.received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self.exchange is not None:
            self.exchange.lost(error)

    def start(self, request: bytes, exchange: _Exchange) -> None:
        assert self._transport is not None
        self.exchange = exchange
        self._transport.write(request)

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()


class Client:
    """Sends requests to one server. Use it inside one event loop, and `close` it there."""

    def __init__(self, target: Target, api_key: str | None = None, timeout: float = 600.0) -> None:
        self._target = target
        self._timeout = timeout
        self._tls = ssl.create_default_context() if target.tls else None
        self._idle: list[_Connection] = []
        self._headers = f"Host: {target.authority}\r\nUser-Agent: quantkit-bench\r\n"
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise InputError("the API key has characters that no header can carry")
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def ask(self, path: str, body: bytes) -> Answer:
        """Streams one answer. What goes wrong is part of the answer, never an exception."""
        reader, events = AnswerReader(time.perf_counter()), Events()
        refusal = bytearray()

        def on_body(response: Response, data: bytes, now: float) -> None:
            if response.status == 200:
                for event in events.feed(data):
                    reader.see(event, now)
            elif len(refusal) < _MOST_ERROR_BYTES:
                refusal.extend(data)

        try:
            response = await self._send("POST", path, body, on_body)
            if response.status != 200:
                raise Failure(f"status {response.status}", _message(bytes(refusal)))
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise Failure(MALFORMED, "the answer is no stream of events")
            return reader.answer()
        except Failure as failure:
            return reader.failed(failure, time.perf_counter())

    async def json(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and parsed body (None where it is no JSON). Raises Failure where there is no answer."""
        received = bytearray()

        def on_body(response: Response, data: bytes, now: float) -> None:
            received.extend(data)

        sent = b"" if body is None else json.dumps(body).encode()
        response = await self._send(method, path, sent, on_body)
        assert response.status is not None
        try:
            return response.status, json.loads(bytes(received))
        except ValueError:
            return response.status, None

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the loop's next round

    async def _send(
        self, method: str, path: str, body: bytes, on_body: Callable[[Response, bytes, float], None]
    ) -> Response:
        head = f"{method} {self._target.prefix}{path} HTTP/1.1\r\n{self._headers}"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            async with asyncio.timeout(self._timeout):
                return await self._exchange(head.encode("latin-1") + body, on_body)
        except TimeoutError:
            raise Failure(TIMEOUT, f"no whole answer within {self._timeout:g} s") from None

    async def _exchange(self, request: bytes, on_body: Callable[[Response, bytes, float], None]) -> Response:
        while True:
            connection = self._take_idle()
            reused = connection is not None
            if connection is None:
                connection = await self._connect()
            exchange = _Exchange(on_body)
            connection.start(request, exchange)
            try:
                await exchange.done
            except Failure:
                if reused and not exchange.begun:
                    continue  # the server had closed a connection that waited; that is no failure of this request
                raise
            finally:
                self._put_back(connection, exchange)
            return exchange.response

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    def _put_back(self, connection: _Connection, exchange: _Exchange) -> None:
        connection.exchange = None
        if not connection.closed and exchange.response.keeps_alive:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                _Connection, self._target.host, self._target.port, ssl=self._tls
            )
        except OSError as error:  # ssl.SSLError is one
            raise Failure(CONNECT, _reason(error)) from None
        return connection


def _reason(error: OSError) -> str:
    """asyncio writes addresses where the system says why; of refused connections the system's words are clearer."""
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _message(body: bytes) -> str:
    try:
        return error_message(json.loads(body)) or body.decode("utf-8", "replace")[:200]
    except ValueError:
        return body.decode("utf-8", "replace")[:200]
