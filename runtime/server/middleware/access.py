"""Who may ask, how often, how much, and for how long: everything that is settled before a request reaches a handler.

    name of the host -> API key -> rate limit -> size and pace of the body

The middleware stands before the parser, so that a stranger cannot make the server read or parse a large body; where no
key is asked for, none is read at all.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quantkit.runtime.server.errors import ApiError, is_tgi
from quantkit.runtime.server.hosts import host_name, is_loopback
from quantkit.runtime.server.logs import note

if TYPE_CHECKING:
    from quantkit.runtime.server.settings import ServerSettings

GUARDED = ("/v1/", "/tokenize", "/detokenize")  # the rest says nothing about prompts: health, metrics, the page
MOST_CALLERS = 10_000  # whose recent requests are remembered
BODY_SECONDS = 60.0  # for a body to arrive
_HALF_CHARACTER = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]")


def is_guarded(path: str, method: str, tgi_routes: bool) -> bool:
    """Whether a request must show a key, counts for a limit, and may have a body."""
    return path.startswith(GUARDED) or (tgi_routes and is_tgi(path, method))


class RateLimit:
    """A bucket of requests for each caller, that fills up evenly within a minute."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # caller -> requests left, when

    def take(self, caller: str, now: float) -> float:
        """Seconds until the caller may ask again; 0 when this request may pass."""
        left, since = self._buckets.pop(caller, (float(self.per_minute), now))
        left = min(self.per_minute, left + (now - since) * self.per_minute / 60)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left, now)
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)  # who was silent longest; their bucket is likely full again
        return 0.0 if allowed else (1 - left) * 60 / self.per_minute


class AccessMiddleware:
    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        limit = settings.rate_limit_requests_per_minute
        self._rate = None if limit is None else RateLimit(limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        guarded = is_guarded(path, method, self._settings.tgi_routes) and method != "OPTIONS"
        try:
            self._check_host(scope)
            if guarded:
                self._check_caller(scope)
            replay = await self._body(scope, receive) if guarded else receive
        except ApiError as error:
            await error.response(scope)(scope, receive, send)
            return
        await self._app(scope, replay, send)

    def _check_host(self, scope: Scope) -> None:
        """Without keys on a loopback address, only pages and programs of this machine may ask. A web page from
        elsewhere could have its own name lead here (DNS rebinding), and would show that name."""
        settings = self._settings
        if settings.api_keys or not settings.on_loopback or "*" in settings.allowed_hosts:
            return
        name = host_name(_header(scope, b"host"))
        if name and not is_loopback(name) and name not in settings.allowed_hosts:
            message = f"this server has no API keys and answers to localhost only, not to '{name}'; see --allowed-hosts"
            raise ApiError(421, message, code="wrong_host")

    def _check_caller(self, scope: Scope) -> None:
        client = scope.get("client")
        caller = f"address {client[0]}" if client else "unknown"
        if self._settings.api_keys:
            caller = self._key_name(scope)
            note(scope, key_name=caller)
        if self._rate is not None and scope["method"] == "POST":
            wait = self._rate.take(caller, time.monotonic())
            if wait:
                raise ApiError(
                    429,
                    f"more than {self._rate.per_minute} requests a minute; the next may come in {wait:.0f} s",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": str(math.ceil(wait))},
                )

    def _key_name(self, scope: Scope) -> str:
        given = _header(scope, b"authorization")
        scheme, _, key = given.partition(" ")
        headers = {"WWW-Authenticate": "Bearer"}
        if not given:
            message = "no API key; send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="missing_api_key", headers=headers)
        name = self._settings.key_name(key.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise ApiError(401, "the API key is not known here", code="invalid_api_key", headers=headers)
        return name

    async def _body(self, scope: Scope, receive: Receive) -> Receive:
        """Reads the whole body, within limits; what comes back gives it to the application in one piece."""
        most = self._settings.max_request_bytes
        told = _header(scope, b"content-length")
        if told.isdigit() and int(told) > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(min(BODY_SECONDS, self._settings.request_timeout_seconds)):
                body = await _read_body(receive, most)
            check_unicode(body or b"")
        except TimeoutError:
            raise ApiError(408, "the body of the request came too slowly", code="timeout") from None
        given = False

        async def replay() -> Message:
            nonlocal given
            if given or body is None:
                return await receive() if body is not None else {"type": "http.disconnect"}
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay


async def _read_body(receive: Receive, most: int) -> bytes | None:
    """None when the client went away meanwhile."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise _too_large(most)
        more = message.get("more_body", False)
    return b"".join(parts)


def check_unicode(body: bytes) -> None:
    """Refuses escapes that are half a character: JSON lets them through, tokenizers and parsers do not expect them."""
    if not _HALF_CHARACTER.search(body):
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body holds half of a surrogate pair, which is no text", code="invalid_json") from None
    except (ValueError, RecursionError):
        return  # no JSON at all, which the parser will say


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body of a request may have {most} bytes at most", code="request_too_large")


def _header(scope: Scope, name: bytes) -> str:
    found = next((value for key, value in scope["headers"] if key == name), b"")
    return str(found.decode("latin-1"))
