"""Connections that take their time, against a real server of uvicorn with an application of one line."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from quantkit.runtime.server import connections
from quantkit.runtime.server.connections import ImpatientProtocol

HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
LIMIT = 0.4  # seconds for a head
Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def slowly(scope: Any, receive: Any, send: Any) -> None:
    """Answers when twice the time of a head is over."""
    await asyncio.sleep(2 * LIMIT)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def ask(client: Client) -> None:
    config = uvicorn.Config(slowly, port=0, log_config=None, lifespan="off", http=ImpatientProtocol)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(20):
            await client(reader, writer)
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def answered(reader: asyncio.StreamReader) -> bool:
    head = await reader.readuntil(b"\r\n\r\n")
    return b" 200 " in head and await reader.readexactly(2) == b"ok"


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    assert await reader.read() == b""


async def dripping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Every byte comes in time, the head does not."""
    closed = asyncio.create_task(reader.read())
    for byte in HEAD * 4:
        writer.write(bytes([byte]))
        await asyncio.sleep(LIMIT / 8)
        if closed.done():
            break
    assert await closed == b""


async def honest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An answer may take longer than a head, and so may the pause after it."""
    for _ in range(2):
        writer.write(HEAD[:9])
        await asyncio.sleep(LIMIT / 4)
        writer.write(HEAD[9:] + b"\r\n")
        assert await answered(reader)
        await asyncio.sleep(2 * LIMIT)


async def half_of_a_second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"\r\n")
    assert await answered(reader)
    writer.write(HEAD)
    assert await reader.read() == b""


@pytest.mark.parametrize("client", [silent, dripping, honest, half_of_a_second], ids=lambda client: client.__name__)
def test_a_request_must_say_soon_what_it_wants(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", LIMIT)
    asyncio.run(ask(client))
