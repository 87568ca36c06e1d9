"""The one endpoint before all models: finds the model of a request, has a replica answer, and copes when one dies.

    CORS -> DrainGate -> AccessMiddleware -> Front -> Backend (a replica of the model) -> Front -> client

Before anything of an answer was sent, a request whose replica died goes to another one, once; after that, or when there
is none, the client gets 503 and may repeat it. A stream that has begun ends with an error event. So nobody is answered
twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from quantkit.deploy.forwarding import Forwarded, Part
from quantkit.deploy.front_metrics import MEDIA_TYPE, merged_metrics
from quantkit.deploy.prefixes import prefix_of
from quantkit.runtime.server.errors import ApiError, as_api_error
from quantkit.runtime.server.logs import log_event
from quantkit.runtime.server.middleware.access import GUARDED, AccessMiddleware
from quantkit.runtime.server.routes.event_stream import event
from quantkit.runtime.server.settings import ServerSettings
from quantkit.runtime.server.version import package_version

ATTEMPTS = 2  # a request that kills its replica must not kill them all
RETRY_SECONDS = 1
REFUSING_SECONDS = 2.0  # a replica whose engine restarts has no load, and would be everybody's choice
LOOK_SECONDS = 10.0  # for answers about models, not of models
REPLICA_HEADER = "x-quantkit-replica"


class ReplicaGone(Exception):
    """The replica died, or cannot be reached; nothing more will come of it."""


class Backend(Protocol):
    """The replicas of all models."""

    def ask(self, model: str, request: Forwarded) -> AsyncGenerator[Part, None]:
        """Has a replica answer; raises ReplicaGone, or ApiError where nobody may take the request."""
        ...

    async def metrics(self, model: str) -> list[tuple[str, str]]:
        """Every replica's name and its numbers in Prometheus' format."""
        ...


class Front:
    def __init__(self, settings: ServerSettings, models: tuple[str, ...], backend: Backend) -> None:
        self._settings = settings
        self._models = models
        self._backend = backend
        self._refusing: dict[str, float] = {}  # replica -> until when it gets only what no other can take

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            guarded = scope["path"].startswith(GUARDED)
            request = await _read(scope, receive if guarded else None)
            answer = await self._own_answer(request)
            if answer is None and not guarded:  # nobody has asked for a key: replicas must not hear of it
                raise ApiError(404, f"there is no {request.path[:100]} here", code="not_found")
            if answer is None:
                await self._forward(self._model_of(request), request, send)
                return
        except ApiError as error:
            answer = error.response(scope)
        await answer(scope, receive, send)

    async def _own_answer(self, request: Forwarded) -> Response | None:
        """None for what a replica answers."""
        if request.method not in ("GET", "HEAD"):
            return None
        if request.path == "/health":
            return JSONResponse({"status": "ok"})
        if request.path == "/version":
            return JSONResponse({"version": package_version()})
        if request.path == "/ready":
            await self._from_all(request)
            return JSONResponse({"status": "ok"})
        if request.path == "/v1/models":
            found = await self._from_all(request)
            return JSONResponse({"object": "list", "data": [model for one in found for model in one["data"]]})
        if request.path == "/metrics":
            parts = await asyncio.gather(*(self._backend.metrics(name) for name in self._models))
            return Response(merged_metrics([one for part in parts for one in part]), media_type=MEDIA_TYPE)
        return None

    async def _from_all(self, request: Forwarded) -> list[Any]:
        """What one replica of each model answers."""
        return await asyncio.gather(*(self._look(name, request) for name in self._models))

    async def _look(self, model: str, request: Forwarded) -> Any:
        status, body = 503, b""
        with contextlib.suppress(TimeoutError, ReplicaGone):
            async with asyncio.timeout(LOOK_SECONDS), aclosing(self._backend.ask(model, request)) as parts:
                async for part in parts:
                    for message in part if isinstance(part, list) else ():
                        status = message.get("status", status)
                        body += message.get("body", b"")
        if status != 200:
            raise _unavailable(f"no replica of '{model}' is ready; try again in a moment", "model_unavailable")
        return json.loads(body)

    def _model_of(self, request: Forwarded) -> str:
        """What is no request for a model goes to the first one, whose application knows the right error."""
        wanted: Any = self._models[0]
        if request.path.startswith("/v1/models/"):
            wanted = request.path.removeprefix("/v1/models/")
        elif request.method == "POST":
            body = _json(request.body)
            wanted = body.get("model", wanted) if body else wanted
            if body and body.get("model") is None and len(self._models) > 1:
                message = f"'model' is missing; this server has: {', '.join(self._models)}"
                raise ApiError(400, message, param="model", code="invalid_value")
        if not isinstance(wanted, str):
            return self._models[0]
        if wanted not in self._models:
            message = f"no model '{wanted[:100]}' here; this server has: {', '.join(self._models)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return wanted

    async def _forward(self, model: str, request: Forwarded, send: Send) -> None:
        request = replace(request, prefix=prefix_of(_json(request.body)), avoid=self._now_refusing())
        refusal: list[Message] = []
        for attempt in range(ATTEMPTS):
            answer = _Answer(send)
            try:
                await self._attempt(model, request, answer)
            except ReplicaGone:
                log_event("a replica died", model=model, replica=answer.replica, attempt=attempt, begun=answer.begun)
                if answer.begun:
                    await answer.break_off()
                    return
            if answer.begun:
                return
            if answer.refusal:
                refusal = answer.refusal
                self._refusing[answer.replica] = time.monotonic() + REFUSING_SECONDS
            if not answer.replica:  # nobody took it: another attempt would not help
                break
            request = replace(request, avoid=(*request.avoid, answer.replica))
        if not refusal:
            raise _unavailable("the replica that computed the answer died; try again", "replica_died")
        for message in refusal:
            await send(message)

    def _now_refusing(self) -> tuple[str, ...]:
        now = time.monotonic()
        self._refusing = {replica: until for replica, until in self._refusing.items() if until > now}
        return tuple(self._refusing)

    async def _attempt(self, model: str, request: Forwarded, answer: _Answer) -> None:
        seconds = self._settings.request_timeout_seconds
        async with aclosing(self._backend.ask(model, request)) as parts:
            try:
                async with asyncio.timeout(seconds):
                    answer.replica = str(await anext(parts))
            except TimeoutError:
                message = f"no replica of '{model}' took the request within {seconds:g} s; try again"
                raise _unavailable(message, "model_unavailable") from None
            async for part in parts:
                for sent in part if isinstance(part, list) else ():
                    await answer.take(sent)


class _Answer:
    """One replica's answer on its way to the client. A 503 is kept back: another replica may do better."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.replica = ""
        self.begun = False
        self.refusal: list[Message] = []
        self._streams = False
        self._complete = False

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] == 503:
                self.refusal.append(message)
                return
            headers = MutableHeaders(scope=message)
            headers[REPLICA_HEADER] = self.replica
            del headers["x-request-id"]  # Serve's proxy writes the same one
            self._streams = headers.get("content-type", "").startswith("text/event-stream")
        if self.refusal:
            self.refusal.append(message)
            return
        self.begun = True
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True

    async def break_off(self) -> None:
        """The replica is gone amid the answer: the end of a stream says so, other answers end without their rest."""
        if self._complete:
            return
        if not self._streams:
            raise ReplicaGone
        error = _unavailable("the replica that computed the answer died; ask again", "replica_died")
        await self._send({"type": "http.response.body", "body": event(error.body), "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def front_app(settings: ServerSettings, models: tuple[str, ...], backend: Backend) -> Starlette:
    """The application that listens."""
    middleware = [Middleware(AccessMiddleware, settings=settings)]
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After", REPLICA_HEADER],
        )
        middleware.insert(0, cors)

    async def unforeseen(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.scope)

    routes = [Mount("/", Front(settings, models, backend))]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={Exception: unforeseen})


async def _read(scope: Scope, receive: Receive | None) -> Forwarded:
    """The request, whose body the middleware has read and bounded, where somebody reads it. Keys stay here."""
    body, more = b"", receive is not None
    while more:
        message = await receive()  # type: ignore[misc]
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = tuple((key, value) for key, value in scope["headers"] if key != b"authorization")
    client = scope.get("client")
    return Forwarded(
        method=scope["method"],
        path=scope["path"],
        query=scope.get("query_string", b""),
        headers=headers,
        client=tuple(client) if client else None,
        body=body,
    )


def _json(body: bytes) -> Mapping[str, Any]:
    """Empty where it is no object: the replica's parser will say so."""
    try:
        found = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)})
