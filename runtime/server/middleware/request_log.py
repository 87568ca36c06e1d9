"""Gives every request an id, and one line in the log when the last byte of its answer is out.

Handlers add to the line through `logs.note`. A prompt is noted only where the operator asked for it, an API key never.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantkit.runtime.server.logs import log_event, noted

if TYPE_CHECKING:
    from quantkit.runtime.server.models.registry import ModelRegistry

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")
_QUIET = ("/health", "/ready", "/metrics", "/page/")  # asked every few seconds


class LogMiddleware:
    def __init__(self, app: ASGIApp, models: ModelRegistry) -> None:
        self._app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, request_id = time.monotonic(), 500, _request_id(scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._write(scope, request_id, status, time.monotonic() - begin)

    def _write(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        found = noted(scope)
        if status >= 400 and scope["method"] == "POST" and not found.accepted:
            self._models.request_refused(status, found.model)
        if status < 400 and scope["path"].startswith(_QUIET):
            return
        client = scope.get("client")
        log_event(
            "request",
            level=logging.ERROR if status == 500 else logging.INFO,  # what clients do wrong is no error of ours
            request_id=request_id,
            method=scope["method"],
            path=scope["path"],  # without the query: clients put secrets there
            status=status,
            seconds=round(seconds, 5),
            client=client[0] if client else None,
            **found.fields,
        )


def _request_id(scope: Scope) -> str:
    """The caller's own, if it is a harmless word."""
    given = next((value.decode("latin-1") for key, value in scope["headers"] if key == b"x-request-id"), "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
