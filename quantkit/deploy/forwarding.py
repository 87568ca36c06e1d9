"""An HTTP request on its way from the front to a replica, and its answer on the way back, as plain values."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from quantkit.deploy.prefixes import Prefix

Part = str | list[Message]  # the replica's name first, then what its application sends
_GOODBYE_SECONDS = 2.0  # for an application to end after its client left


@dataclass(frozen=True)
class Forwarded:
    """A request whose body has been read."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes
    prefix: Prefix = ()
    avoid: tuple[str, ...] = ()  # replicas that failed with it

    @property
    def scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
            "state": {},
        }


async def answer(app: ASGIApp, request: Forwarded) -> AsyncGenerator[list[Message], None]:
    """Runs a request through an application. What it sends while the reader is busy comes in one piece.

    Leaving early is what a closed connection is elsewhere: the application hears that its client left.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    async def run() -> None:
        try:
            await app(request.scope, receive, send)
        finally:
            sent.put_nowait(None)

    running = asyncio.ensure_future(run())
    try:
        more = True
        while more:
            batch = [await sent.get()]
            while not sent.empty():
                batch.append(sent.get_nowait())
            more = batch[-1] is not None
            messages = [message for message in batch if message is not None]
            if messages:
                yield messages
        await running  # raises what the application did
    finally:
        left.set()
        if not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({running}, timeout=_GOODBYE_SECONDS)
            running.cancel()
