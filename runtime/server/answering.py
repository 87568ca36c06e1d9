"""A request that the engine process answers, on the server's side: what has come of it, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from quantkit.errors import QuantkitError
from quantkit.runtime.engine.engine import Delta


class EngineDied(QuantkitError):
    """The engine process is gone, and the request with it."""


class Forgets(Protocol):
    """Who must be told when nobody waits for an answer any longer."""

    def forget(self, request_id: int) -> None: ...


class Answering:
    """An accepted request: its deltas, as they come."""

    def __init__(self, client: Forgets, request_id: int, answers: int) -> None:
        self.request_id = request_id
        self.prompt_logprobs: list[float | None] | None = None
        self.prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
        self.queued_seconds: float | None = None
        self.cached_tokens = 0
        self.guesses: dict[int, tuple[int, int]] = {}  # answer -> tokens that were guessed for it, and accepted ones
        self._client = client
        self.unanswered = answers  # that the engine still owes
        self._open = answers  # that the reader still waits for
        self._queue: asyncio.Queue[Delta | QuantkitError] = asyncio.Queue()
        self._failure: QuantkitError | None = None

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._open == 0:
            raise StopAsyncIteration
        found = self._failure or await self._queue.get()
        if isinstance(found, QuantkitError):
            self._open = 0
            raise found
        return self._seen(found)

    def ready(self) -> Iterator[Delta]:
        """The deltas that are there already: a server that falls behind then catches up with one event for several."""
        while self._open and not self._queue.empty():
            found = self._queue.get_nowait()
            if isinstance(found, QuantkitError):  # raised when the next one is asked for
                self._failure = found
                return
            yield self._seen(found)

    def _seen(self, delta: Delta) -> Delta:
        if delta.finished is not None:
            self._open -= 1
        return delta

    def abort(self) -> None:
        """Ends the request; its pages are free within a step."""
        self._open = 0
        self._client.forget(self.request_id)

    def put(self, found: Delta | QuantkitError) -> None:
        self._queue.put_nowait(found)
