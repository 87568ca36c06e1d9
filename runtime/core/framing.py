"""Messages over sockets: a frame is a kind and a length, four bytes each, and then so many bytes.

Kind 0 is a JSON object; what others mean is for those who exchange them. A connection that closes means that the other
side is gone.
"""

from __future__ import annotations

import json
import socket
import struct
from asyncio import StreamReader
from typing import Any

Message = dict[str, Any]
JSON = 0  # the kind of a frame that `pack_message` makes
LARGEST = 1 << 30  # bytes; more is no frame of ours
_HEAD = struct.Struct("<II")


def pack_frame(kind: int, body: bytes = b"") -> bytes:
    return _HEAD.pack(kind, len(body)) + body


def pack_message(message: Message) -> bytes:
    return pack_frame(JSON, json.dumps(message, separators=(",", ":")).encode())


def read_frame(source: socket.socket) -> tuple[int, bytes] | None:
    """The next kind and body; None when the other side is gone."""
    head = _exactly(source, _HEAD.size)
    if head is None:
        return None
    kind, size = _opened(head)
    body = _exactly(source, size)
    return None if body is None else (kind, body)


def read_message(source: socket.socket) -> Message | None:
    """The next message, where nothing else is sent; None when the other side is gone."""
    frame = read_frame(source)
    return None if frame is None else unpack_message(frame[1])


async def read_message_async(source: StreamReader) -> Message:
    """The same; IncompleteReadError when the other side is gone."""
    _, size = _opened(await source.readexactly(_HEAD.size))
    return unpack_message(await source.readexactly(size))


def unpack_message(body: bytes) -> Message:
    message: Message = json.loads(body)
    return message


def _opened(head: bytes) -> tuple[int, int]:
    kind, size = _HEAD.unpack(head)
    assert size <= LARGEST, "the connection is out of step: this is no frame"
    return kind, size


def _exactly(source: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        try:
            part = source.recv(min(size, 1 << 20))
        except OSError:  # it was killed, or this end was closed
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
