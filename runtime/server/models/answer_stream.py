"""Tokens of the engine process in, pieces of text out: what one prompt's answers say, and what is measured of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.token_output import TokenOutput
from quantkit.runtime.output.output_processor import OutputProcessor, TextOutput
from quantkit.runtime.server.engine_process.pending import PendingRequest
from quantkit.runtime.server.errors import ApiError
from quantkit.runtime.server.schemas.logprobs import Scored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quantkit.runtime.server.metrics import ServerMetrics


@dataclass(frozen=True)
class Piece:
    """What is new in one answer to one prompt."""

    prompt: int
    index: int
    text: str
    tokens: tuple[Scored, ...] = ()  # empty where nobody asked for log-probabilities
    finished: str | None = None
    end_token: Scored | None = None  # which is no part of the text
    stop_text: bool = False  # whether it ends at a stop string


@dataclass
class _Answer:
    """One of the n answers while it grows."""

    tokens: list[int] = field(default_factory=list)
    newest: float | None = None  # when its last token came
    finished: bool = False


@dataclass
class AnswerStream:
    """The n answers to one prompt. `no_text` keeps their tokens back: the client wants the prompt only."""

    pending: PendingRequest
    prompt: Sequence[int]
    params: SamplingParams
    tokenizer: PreTrainedTokenizerBase
    eos: tuple[int, ...]
    metrics: ServerMetrics
    arrived: float
    number: int = 0  # of the prompt, among those of the request
    no_text: bool = False
    one_by_one: bool = False  # a piece for each token, even where several are there
    first_token_seconds: float | None = None

    def __post_init__(self) -> None:
        self._each = [_Answer() for _ in range(self.params.n)]
        self._processor = OutputProcessor(self.tokenizer, self.prompt, self.params, self.eos, self.pending.abort)

    @property
    def generated(self) -> int:
        """Tokens of all answers, up to where each ended."""
        return 0 if self.no_text else sum(len(answer.tokens) for answer in self._each)

    @property
    def predicted(self) -> tuple[int, int]:
        """Guessed tokens that stand in the answers, and those that do not: wrong ones, and those behind an end."""
        guessed = sum(guessed for guessed, _ in self.pending.guesses.values())
        shown = 0
        for index, (_, accepted) in self.pending.guesses.items():
            shown += min(accepted, max(len(self._each[index].tokens) - 1, 0))  # the first token is never guessed
        return shown, guessed - shown

    @property
    def finished_tokens(self) -> list[list[int]]:
        """Of the answers that came to their end."""
        return [answer.tokens for answer in self._each if answer.finished and answer.tokens]

    @property
    def prompt_tokens(self) -> list[Scored]:
        """The prompt with its log-probabilities, where they were asked for."""
        values, top = self.pending.prompt_logprobs, self.pending.prompt_top_logprobs
        return [Scored(*row) for row in zip(self.prompt, values, top, strict=True)] if values else []

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Until every answer has ended. Leaving early ends the engine's request."""
        try:
            async for output in self.pending:
                pieces = [self._take(one) for one in (output, *self.pending.ready())]
                new = [piece for piece in pieces if piece is not None]
                for piece in new if self.one_by_one else _joined(new):
                    yield piece
                if self._processor.finished:
                    return
        finally:
            self.pending.abort()

    def _take(self, output: TokenOutput) -> Piece | None:
        """None where there is nothing to show: an answer that has met its stop string, half a character."""
        found = self._processor.process(output)
        if found is None:
            return None
        if found.finished in ("error", "abort"):
            why = found.stop_reason or "it ended before its time"
            raise ApiError(500, f"the engine gave the answer up: {why}", code="engine_error")
        answer = self._each[found.index]
        self._observe(answer)
        if found.token is not None:
            answer.tokens.append(found.token)
        answer.finished = found.finished is not None
        text, scored = ("", None) if self.no_text else (found.text, _scored(found))
        if not text and scored is None and not answer.finished:
            return None
        reason = "length" if self.no_text and answer.finished else found.finished
        ends = scored is not None and scored.id in self._processor.end_tokens
        tokens = () if scored is None or ends else (scored,)
        end_token = scored if ends else None
        return Piece(self.number, found.index, text, tokens, reason, end_token, isinstance(found.stop_reason, str))

    def _observe(self, answer: _Answer) -> None:
        now = time.monotonic()
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self.arrived
            self.metrics.request_queued(self.pending.queued_seconds or 0.0)
        if answer.newest is None:
            self.metrics.first_token(now - self.arrived)
        else:
            self.metrics.token_gap(now - answer.newest)
        answer.newest = now


def _scored(output: TextOutput) -> Scored | None:
    """The token, where log-probabilities were asked for."""
    if output.token is None or output.logprob is None:
        return None
    return Scored(output.token, output.logprob, output.top or ())


def _joined(pieces: list[Piece]) -> list[Piece]:
    """One piece for each answer, from pieces of one prompt."""
    if len(pieces) < 2:
        return pieces
    found: dict[int, Piece] = {}
    for piece in pieces:
        before = found.get(piece.index)
        if before is not None:
            piece = replace(piece, text=before.text + piece.text, tokens=before.tokens + piece.tokens)
        found[piece.index] = piece
    return list(found.values())


async def merged(sources: Sequence[AnswerStream]) -> AsyncGenerator[Piece, None]:
    """The pieces of several prompts, as they come."""
    if len(sources) == 1:  # the usual case needs no task of its own
        async with aclosing(sources[0].pieces()) as pieces:
            async for piece in pieces:
                yield piece
        return
    found: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(source, found)) for source in sources]
    try:
        open_sources = len(tasks)
        while open_sources:
            item = await found.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_sources -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: AnswerStream, found: asyncio.Queue[Piece | Exception | None]) -> None:
    try:
        async with aclosing(source.pieces()) as pieces:
            async for piece in pieces:
                found.put_nowait(piece)
        found.put_nowait(None)
    except Exception as error:  # raised where the pieces are read
        found.put_nowait(error)
