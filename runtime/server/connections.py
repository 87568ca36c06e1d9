"""Connections that take their time: a client must say soon what it wants, and must take what is sent to it.

uvicorn knows neither limit. It closes a connection on which nothing comes between two requests; one byte of a request
whose end never comes would hold a connection for ever, of which there are `max_connections`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 30.0  # from a connection, or from the first byte of a later request, to the end of a request's head
UNREAD_SECONDS = 60.0  # that a client may take nothing of what was sent to it; then the connection is cut


class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's, with a limit for the heads of requests. Bodies have one of their own (`middleware/access.py`)."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering:
            self._wait_no_more()
        elif self._waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        if not self._answering:
            self.transport.close()


def cut_unread_connections(listener: socket.socket) -> None:
    """Connections inherit this. Closing one does not help: what was written before is sent first, and a client that
    does not read could keep it open for as long as it likes, given up or not."""
    if sys.platform == "linux":  # others have no such option
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_SECONDS))
