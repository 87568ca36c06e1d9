"""Where ranks come in: rank 0 listens until all of them have called. A rank greets with the token that it was given.

Nothing that a caller sends is interpreted before it is known: a greeting is so many bytes, and either right or not.
Callers are read side by side, so one that is slow, or says nothing, keeps nobody waiting.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field

GREETING_SECONDS = 10.0  # for a caller to say who it is
MOST_CALLERS = 64  # that have not said so yet; the one who has waited longest gives way
TOKEN_BYTES = 16
_GREETING = struct.Struct(f"<{TOKEN_BYTES}sI")


def new_token() -> str:
    return secrets.token_hex(TOKEN_BYTES)


def greet(connection: socket.socket, rank: int, token: str) -> None:
    """A rank's first words."""
    connection.sendall(_GREETING.pack(bytes.fromhex(token), rank))


@dataclass
class _Caller:
    connection: socket.socket
    until: float
    said: bytearray = field(default_factory=bytearray)


class Door:
    def __init__(self, host: str, token: str) -> None:
        self._token = bytes.fromhex(token)
        self._listening = socket.create_server((host, 0))
        self._listening.setblocking(False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._listening, selectors.EVENT_READ)
        self._callers: dict[socket.socket, _Caller] = {}  # in the order in which they came

    @property
    def port(self) -> int:
        port: int = self._listening.getsockname()[1]
        return port

    def wait(self, seconds: float) -> dict[int, socket.socket]:
        """Ranks that have greeted, after this time at most. Everybody else is turned away when it is clear."""
        found: dict[int, socket.socket] = {}
        for key, _ in self._ready.select(seconds):
            if key.fileobj is self._listening:
                self._open()
            elif (caller := self._callers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                rank = self._read(caller)
                if rank is not None:
                    found[rank] = self._let_in(caller)
        now = time.monotonic()
        for caller in [caller for caller in self._callers.values() if caller.until < now]:
            self._turn_away(caller)
        return found

    def close(self) -> None:
        """May be called again."""
        for caller in list(self._callers.values()):
            self._turn_away(caller)
        self._ready.close()
        self._listening.close()

    def _open(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:  # the caller left at once, or this process has no handle left for it
            return
        connection.setblocking(False)
        self._callers[connection] = _Caller(connection, time.monotonic() + GREETING_SECONDS)
        self._ready.register(connection, selectors.EVENT_READ)
        if len(self._callers) > MOST_CALLERS:
            self._turn_away(next(iter(self._callers.values())))

    def _read(self, caller: _Caller) -> int | None:
        """The rank, when it has said its whole greeting, and that is right."""
        try:
            part = caller.connection.recv(_GREETING.size - len(caller.said))
        except OSError:
            part = b""
        caller.said += part
        if part and len(caller.said) < _GREETING.size:
            return None
        if part:
            token, rank = _GREETING.unpack(caller.said)
            if secrets.compare_digest(token, self._token):
                return int(rank)
        self._turn_away(caller)
        return None

    def _let_in(self, caller: _Caller) -> socket.socket:
        self._ready.unregister(caller.connection)
        del self._callers[caller.connection]
        caller.connection.setblocking(True)
        return caller.connection

    def _turn_away(self, caller: _Caller) -> None:
        self._let_in(caller).close()
