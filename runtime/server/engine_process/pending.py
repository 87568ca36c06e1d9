"""A request that the engine process answers, on the server's side: what has come of it, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from quantkit.errors import QuantkitError
from quantkit.runtime.core.token_output import TokenOutput


class EngineDied(QuantkitError):
    """The engine process is gone, and the request with it."""


class Forgets(Protocol):
    """Who must be told when nobody waits for a request, or for one of its answers, any longer."""

    def forget(self, request_id: int, index: int | None = None) -> None: ...


class PendingRequest:
    """An accepted request: the outputs of the engine, as they come."""

    def __init__(self, client: Forgets, request_id: int, answers: int) -> None:
        self.request_id = request_id
        self.prompt_logprobs: list[float | None] = []  # where they were asked for; None for the first token
        self.prompt_top_logprobs: list[list[tuple[int, float]]] = []
        self.queued_seconds: float | None = None
        self.cached_tokens = 0
        self.guesses: dict[int, tuple[int, int]] = {}  # answer -> tokens that were guessed for it, and accepted ones
        self._client = client
        self.unanswered = set(range(answers))  # that the engine still owes
        self._open = set(range(answers))  # that the reader still waits for
        self._queue: asyncio.Queue[TokenOutput | QuantkitError] = asyncio.Queue()
        self._failure: QuantkitError | None = None

    def __aiter__(self) -> AsyncIterator[TokenOutput]:
        return self

    async def __anext__(self) -> TokenOutput:
        if not self._open:
            raise StopAsyncIteration
        found = self._failure or await self._queue.get()
        if isinstance(found, QuantkitError):
            self._open.clear()
            raise found
        return self._seen(found)

    def ready(self) -> Iterator[TokenOutput]:
        """The outputs that are there already: a server that falls behind then catches up with one event for several."""
        while self._open and not self._queue.empty():
            found = self._queue.get_nowait()
            if isinstance(found, QuantkitError):  # raised when the next one is asked for
                self._failure = found
                return
            yield self._seen(found)

    def _seen(self, output: TokenOutput) -> TokenOutput:
        if output.finished is not None:
            self._open.discard(output.index)
        return output

    def abort(self, index: int | None = None) -> None:
        """Ends the request, or one of its answers; the pages are free within a step."""
        self._open -= self._open.copy() if index is None else {index}
        self._client.forget(self.request_id, index)

    def put(self, found: TokenOutput | QuantkitError) -> None:
        self._queue.put_nowait(found)
