"""Server-sent events in OpenAI's way: `data: {...}` for each chunk, `data: [DONE]` at the end (not in TGI's way).

The status of the answer is decided when the first chunk is there, so that what goes wrong before it gets a proper one.
Later, an error becomes an event in the shape of an error, and the stream ends without [DONE]. A client that does not
read is not waited for: it would hold its places in the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quantkit.runtime.server.errors import ApiError, as_api_error
from quantkit.runtime.server.routes.call import CLIENT_LEFT, Call, ClientLeft, client_left, end_tasks

Chunks = AsyncGenerator[dict[str, Any], None]
_as_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: `json.dumps` would make one for every chunk
_DONE = b"data: [DONE]\n\n"
STALLED_SECONDS = 30.0  # that a client may take to read what is there
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must pass events on at once


class EventStream(Response):
    """Sends chunks until they end, the client leaves, or time is up; closes its call in every case."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, first: dict[str, Any], rest: Chunks, last: bytes = _DONE) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._call = call
        self._first = first
        self._rest = rest
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(scope, send))
        left = asyncio.ensure_future(client_left(receive))
        error: BaseException | None = ClientLeft()
        try:
            await asyncio.wait({sending, left}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                error = sending.result()
        finally:
            await end_tasks(sending, left)
            await self._rest.aclose()
            self._call.close(error)

    async def _send_all(self, scope: Scope, send: Send) -> Exception | None:
        """Gives back what went wrong, after telling the client."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        failure: Exception | None = None
        try:
            async with self._call.limit():
                await _send_part(send, event(self._first))
                async for chunk in self._rest:
                    await _send_part(send, event(chunk))
            if self._last:
                await _send_part(send, self._last)
            await _send_part(send, b"", more=False)
        except (OSError, ClientStalled) as error:
            return error  # the connection broke, or nobody reads it; there is nobody to tell
        except Exception as error:
            failure = error
            with contextlib.suppress(ClientStalled):
                await _send_part(send, event(as_api_error(error).body_for(scope)))
                await _send_part(send, b"", more=False)
        return failure


class ClientStalled(ApiError):
    """The client does not read its answer."""

    def __init__(self) -> None:
        super().__init__(CLIENT_LEFT, "the client does not read its answer", code="client_stalled")


def event(content: dict[str, Any]) -> bytes:
    return f"data: {_as_json(content)}\n\n".encode()


async def _send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    """Raises ClientStalled where the client takes too long."""
    try:
        async with asyncio.timeout(STALLED_SECONDS) as limit:
            await send({"type": "http.response.body", "body": body, "more_body": more})
    except TimeoutError:
        if limit.expired():
            raise ClientStalled from None
        raise  # the request's own limit


async def start_stream(call: Call, chunks: Chunks, last: bytes = _DONE) -> EventStream:
    """Waits for the first chunk; raises what goes wrong before it. `last` ends a stream in which nothing went wrong."""
    first = await call.watched(chunks.__anext__())
    return EventStream(call, first, chunks, last)
