"""Frames over sockets: what goes in comes out, in whatever pieces it travels, and an end is seen as one."""

import asyncio
import socket
import threading

import pytest

from quantkit.runtime.core import framing

LONG = {"add": {"prompt": list(range(300_000)), "text": "größer"}}  # more than a socket holds


def test_messages_and_frames_in_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = framing.pack_message(LONG) + framing.pack_frame(7, b"\x00body") + framing.pack_frame(8)
        sending = threading.Thread(target=ours.sendall, args=(sent,))
        sending.start()
        assert framing.read_message(theirs) == LONG
        assert framing.read_frame(theirs) == (7, b"\x00body")
        assert framing.read_frame(theirs) == (8, b"")
        sending.join()


@pytest.mark.parametrize("cut", [0, 3, 8, 12])
def test_the_other_side_is_gone(cut: int) -> None:
    """Between frames, within a head, and within a body."""
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(framing.pack_message({"ready": True})[:cut])
        ours.close()
        assert framing.read_message(theirs) is None
    assert framing.read_message(theirs) is None  # closed on this side


def test_asyncio_reads_the_same() -> None:
    async def run() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(framing.pack_message({"a": 1}) + framing.pack_message(LONG)[:20])
        reader.feed_eof()
        assert await framing.read_message_async(reader) == {"a": 1}
        with pytest.raises(asyncio.IncompleteReadError):
            await framing.read_message_async(reader)

    asyncio.run(run())


def test_what_is_no_frame() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(AssertionError, match="out of step"):
            framing.read_frame(theirs)
