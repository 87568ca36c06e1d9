"""Messages between rank 0 and the other ranks, over one TCP connection for each.

Steps are lists of whole numbers and travel as they are, eight bytes each; what is said once is JSON. A frame is its
kind, its length (four bytes each) and its body. A connection that closes means that the other side is gone.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any

Talk = dict[str, Any]
Lists = list[list[int]]
_HEAD = struct.Struct("<II")
_LARGEST = 1 << 30  # bytes; more is no frame of ours


class Kind(IntEnum):
    """What a frame asks for."""

    TALK = 0  # JSON
    MOVES = 1  # pages change hands
    STEP = 2  # compute a step
    ROWS = 3  # the rows of a step are back at the first stage: compute their logits
    BATCH = 4  # compute a batch beside the scheduler's steps
    LOGITS = 5  # compute logits of hidden states that rank 0 gives
    EMBED = 6  # look up tokens that rank 0 gives
    KEEP = 7  # move keys and values of single tokens
    CAPTURE = 8  # make a graph
    REPORT = 9  # say how long you computed
    STOP = 10


class Channel:
    """One end of a connection. Any thread may send; one reads."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._sending = threading.Lock()

    @property
    def own_host(self) -> str:
        """The address of this end."""
        host: str = self._connection.getsockname()[0]
        return host

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """ConnectionError where the other side is gone."""
        with self._sending:
            self._connection.sendall(_HEAD.pack(kind, len(body)) + body)

    def say(self, talk: Talk) -> None:
        self.send(Kind.TALK, json.dumps(talk).encode())

    def read(self) -> tuple[Kind, bytes] | None:
        """The next frame; None when the other side is gone."""
        head = self._exactly(_HEAD.size)
        if head is None:
            return None
        kind, size = _HEAD.unpack(head)
        assert size <= _LARGEST, "the connection between ranks is out of step"
        body = self._exactly(size)
        return None if body is None else (Kind(kind), body)

    def close(self) -> None:
        """Wakes whoever reads, on both sides."""
        with suppress(OSError):  # it was closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _exactly(self, size: int) -> bytes | None:
        parts = []
        while size:
            try:
                part = self._connection.recv(min(size, 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def pack(lists: Sequence[Sequence[int]]) -> bytes:
    """How many lists, how long each is, then all numbers."""
    numbers = array("q", [len(lists), *map(len, lists)])
    for one in lists:
        numbers.extend(one)
    return numbers.tobytes()


def unpack(body: bytes) -> Lists:
    numbers = array("q")
    numbers.frombytes(body)
    count = numbers[0]
    lists, start = [], 1 + count
    for length in numbers[1 : 1 + count]:
        lists.append(numbers[start : start + length].tolist())
        start += length
    return lists


def unpack_talk(body: bytes) -> Talk:
    talk: Talk = json.loads(body)
    return talk
