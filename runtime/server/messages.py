"""Messages between the server and its engine process: JSON behind a length of four bytes, over a pair of sockets."""

from __future__ import annotations

import json
import socket
from asyncio import StreamReader
from typing import Any

Message = dict[str, Any]
_LENGTH = 4
LARGEST = 1 << 30  # bytes; more is no message of ours


def encode(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return len(body).to_bytes(_LENGTH, "big") + body


def read(source: socket.socket) -> Message | None:
    """The next message; None when the other side is gone."""
    head = _exactly(source, _LENGTH)
    if head is None:
        return None
    body = _exactly(source, _size(head))
    return None if body is None else json.loads(body)


async def read_async(source: StreamReader) -> Message:
    """The next message; IncompleteReadError when the other side is gone."""
    return json.loads(await source.readexactly(_size(await source.readexactly(_LENGTH))))  # type: ignore[no-any-return]


def _size(head: bytes) -> int:
    size = int.from_bytes(head, "big")
    assert size <= LARGEST, "the connection to the engine process is out of step"
    return size


def _exactly(source: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        try:
            part = source.recv(min(size, 1 << 20))
        except ConnectionError:  # it was killed
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
