"""HTTP by hand, one connection a request: clients here leave, stall and send what no library would."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LONGEST_LINE = 1 << 24  # of an event; one may hold many tokens with their log-probabilities


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of an error."""
        return str(self.json["error"]["code"])


def as_request(path: str, body: bytes, *, method: str = "POST", host: str = "localhost") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def as_json_request(path: str, body: Any) -> bytes:
    return as_request(path, json.dumps(body).encode())


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LONGEST_LINE)
    try:
        yield reader, writer
    finally:
        writer.close()


async def read_status(reader: asyncio.StreamReader) -> int:
    """The status of an answer, whose head is read then."""
    line = await reader.readline()
    if not line:
        raise ConnectionError("the server closed the connection without an answer")
    while (await reader.readline()).strip():
        pass
    return int(line.split()[1])


async def send_raw(port: int, request: bytes) -> Reply:
    async with connection(port) as (reader, writer):
        writer.write(request)
        status = await read_status(reader)
        return Reply(status, await reader.read())


async def get(port: int, path: str) -> Reply:
    return await send_raw(port, as_request(path, b"", method="GET"))


async def post(port: int, path: str, body: Any) -> Reply:
    return await send_raw(port, as_json_request(path, body))


async def events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Of a stream whose head was read; raises ConnectionError where it ends without [DONE] and without an error."""
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            yield event
            if "error" in event:
                return
    raise ConnectionError("the stream ended in the middle")
