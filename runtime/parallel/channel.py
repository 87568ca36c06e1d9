"""Messages between rank 0 and the other ranks, over one TCP connection for each.

Steps are lists of whole numbers and travel as they are, eight bytes each; what is said once is JSON. Frames are those
of `core/framing.py`. A connection that closes means that the other side is gone.
"""

from __future__ import annotations

import socket
import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

from quantkit.runtime.core import framing

Talk = framing.Message
Lists = list[list[int]]


class Kind(IntEnum):
    """What a frame asks for."""

    TALK = framing.JSON
    MOVES = 1  # pages change hands
    STEP = 2  # compute a step
    ROWS = 3  # the rows of a step are back at the first stage: compute their logits
    BATCH = 4  # compute a batch beside the scheduler's steps
    LOGITS = 5  # compute logits of hidden states that rank 0 gives
    EMBED = 6  # look up tokens that rank 0 gives
    KEEP = 7  # move keys and values of single tokens
    CAPTURE = 8  # make a graph
    REPORT = 9  # say how long you computed
    CENTRE = 10  # the batch that follows is to measure centres of keys by
    STOP = 11


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
            self._connection.sendall(framing.pack_frame(kind, body))

    def say(self, talk: Talk) -> None:
        with self._sending:
            self._connection.sendall(framing.pack_message(talk))

    def read(self) -> tuple[Kind, bytes] | None:
        """The next frame; None when the other side is gone."""
        frame = framing.read_frame(self._connection)
        return None if frame is None else (Kind(frame[0]), frame[1])

    def close(self) -> None:
        """Wakes whoever reads, on both sides."""
        with suppress(OSError):  # it was closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


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
    return framing.unpack_message(body)
