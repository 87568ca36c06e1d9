"""HTTP/1.1 responses and server-sent events, from bytes that may be cut anywhere.

Written for this client because it must not be what is measured: a general HTTP library spends several times as long on
each event as the server does. Only what servers of language models send is known here.
"""

from __future__ import annotations

_MOST_HEAD = 64 * 1024  # bytes of status line and headers; more is no HTTP server
_CHUNKED, _COUNTED, _UNTIL_CLOSE = "chunked", "counted", "until close"


class WireError(ValueError):
    """Bytes that are not what they should be."""


class Response:
    """One response. `feed` gives the body's bytes as they come; `complete` says when no more belong to it."""

    def __init__(self) -> None:
        self.status: int | None = None  # known when the head is
        self.headers: dict[str, str] = {}  # lower-case names
        self.complete = False
        self._rest = b""  # read, but not understood yet
        self._framing = ""
        self._missing = 0  # bytes of the current chunk, or of the body
        self._after_chunk = False  # the line end behind a chunk comes next
        self._trailer = False  # the last chunk was seen; lines until an empty one follow

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection takes another request."""
        return self.complete and self._framing != _UNTIL_CLOSE and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data` and what was kept of earlier calls."""
        data = self._rest + data if self._rest else data
        self._rest = b""
        while self.status is None:
            head, end, data = data.partition(b"\r\n\r\n")
            if not end:
                if len(head) > _MOST_HEAD:
                    raise WireError("the server's answer has no end of headers")
                self._rest = head
                return b""
            self._read_head(head)
        if self._framing == _CHUNKED:
            return self._chunks(data)
        if self._framing == _COUNTED:
            taken = data[: self._missing]
            self._missing -= len(taken)
            self.complete = self._missing == 0
            return taken
        return data

    def end_of_stream(self) -> None:
        """The server closed the connection, which is how a body without a length ends."""
        if self.status is not None and self._framing == _UNTIL_CLOSE:
            self.complete = True

    def _read_head(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        status = rest[:3]
        if not version.startswith("HTTP/1.") or not (status.isascii() and status.isdigit() and len(status) == 3):
            raise WireError(f"the server does not speak HTTP/1.1: it begins with '{lines[0][:40]}'")
        if status[0] == "1":
            return  # an interim answer; the real one follows
        self.status = int(status)
        pairs = (line.partition(":") for line in lines[1:])
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._frame()

    def _frame(self) -> None:
        length = self.headers.get("content-length")
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            self._framing = _CHUNKED
        elif self.status in (204, 304):
            self._framing, self.complete = _COUNTED, True
        elif length is None:
            self._framing = _UNTIL_CLOSE
        elif length.isascii() and length.isdigit():
            self._framing, self._missing = _COUNTED, int(length)
            self.complete = self._missing == 0
        else:
            raise WireError(f"the server's Content-Length is '{length}'")

    def _chunks(self, data: bytes) -> bytes:
        """The chunks' contents. A line that is not whole is kept for the next call."""
        found = []
        at, size = 0, len(data)
        while at < size and not self.complete:
            if self._missing:
                piece = data[at : at + self._missing]
                found.append(piece)
                at += len(piece)
                self._missing -= len(piece)
                self._after_chunk = self._missing == 0
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._rest = data[at:]
                break
            self._chunk_line(data[at:end].rstrip(b"\r"))
            at = end + 1
        return found[0] if len(found) == 1 else b"".join(found)

    def _chunk_line(self, line: bytes) -> None:
        if self._trailer:
            self.complete = not line
        elif self._after_chunk:
            if line:
                raise WireError("a chunk is longer than it said")
            self._after_chunk = False
        else:
            try:
                self._missing = int(line.partition(b";")[0], 16)
            except ValueError:
                raise WireError(f"a chunk's size is '{line[:20].decode('latin-1')}'") from None
            self._trailer = self._missing == 0


class Events:
    """Server-sent events. `feed` gives the data of every event that is whole.

    Lines end with \\n or \\r\\n; a lone \\r, which the standard allows and no server sends, ends nothing.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        lines = (self._rest + body if self._rest else body).split(b"\n")
        self._rest = lines.pop()
        found = []
        for line in lines:
            if line[-1:] == b"\r":
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                found.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return found
