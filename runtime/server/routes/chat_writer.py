"""Pieces of answers in, OpenAI's chat objects out: whole, or as chunks. Tool calls are told apart from text here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quantkit.runtime.server.models.answer_stream import Piece
from quantkit.runtime.server.routes.call import Call
from quantkit.runtime.server.routes.event_stream import Chunks
from quantkit.runtime.server.schemas.logprobs import Scored, chat_logprobs
from quantkit.runtime.server.schemas.requests import ChatRequest
from quantkit.runtime.server.tools.offered import OfferedTools
from quantkit.runtime.server.tools.parsers import ToolPiece, ToolStream, gathered


@dataclass
class _Told:
    """One answer so far. Without a stream of tools, everything is text."""

    tools: ToolStream | None
    most_calls: int | None
    pieces: list[ToolPiece] = field(default_factory=list)
    tokens: list[Scored] = field(default_factory=list)
    reason: str | None = None

    def take(self, piece: Piece) -> ToolPiece:
        """What is new."""
        found = [ToolPiece(piece.text)]
        if self.tools is not None:
            found = [self.tools.push(piece.text), *([self.tools.finish()] if piece.finished else [])]
        calls = [call for one in found for call in one.calls if self.most_calls is None or call.index < self.most_calls]
        new = ToolPiece("".join(one.content for one in found), tuple(calls))
        self.pieces.append(new)
        self.tokens += piece.tokens
        if piece.finished:
            made = self.tools is not None and self.tools.calls_made > 0 and piece.finished == "stop"
            self.reason = "tool_calls" if made else piece.finished
        return new


class ChatWriter:
    def __init__(self, call: Call, body: ChatRequest, tools: OfferedTools | None) -> None:
        self._call = call
        self._body = body
        most = 1 if body.parallel_tool_calls is False else None
        self._told = [_Told(None if tools is None else tools.stream(), most) for _ in range(body.answers)]
        self._head = {
            "id": call.id,
            "created": call.created,
            "model": call.model_name,
            "system_fingerprint": call.model.fingerprint,
        }

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._call.pieces()) as pieces:
            async for piece in pieces:
                self._take(piece)
        choices = [self._choice(index, told) for index, told in enumerate(self._told)]
        return self._head | {"object": "chat.completion", "choices": choices, "usage": self._call.usage}

    async def chunks(self) -> Chunks:
        """For each answer: its role, its text and calls as they come, its end; the usage last, where it is wanted."""
        head: dict[str, Any] = self._head | {"object": "chat.completion.chunk"}
        if self._body.wants_usage:
            head["usage"] = None
        started = set()
        async with aclosing(self._call.pieces()) as pieces:
            async for piece in pieces:
                if piece.index not in started:
                    started.add(piece.index)
                    yield head | _chunk(piece.index, {"role": "assistant", "content": ""})
                new, logprobs = self._take(piece), self._logprobs(piece.tokens)
                if new.content or (logprobs and piece.tokens and not new.calls):
                    yield head | _chunk(piece.index, {"content": new.content}, logprobs)
                    logprobs = None
                for call in new.calls:
                    yield head | _chunk(piece.index, {"tool_calls": [call.as_json()]}, logprobs)
                    logprobs = None
                if piece.finished:
                    yield head | _chunk(piece.index, {}, reason=self._told[piece.index].reason)
        if self._body.wants_usage:
            yield head | {"choices": [], "usage": self._call.usage}

    def _take(self, piece: Piece) -> ToolPiece:
        told = self._told[piece.index]
        new = told.take(piece)
        self._call.finish_reason = told.reason or self._call.finish_reason
        return new

    def _logprobs(self, tokens: Sequence[Scored]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, self._call.token_texts) if self._body.logprobs else None

    def _choice(self, index: int, told: _Told) -> dict[str, Any]:
        content, calls = gathered(told.pieces)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [call.as_json() for call in calls]}
        logprobs = self._logprobs(told.tokens)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": told.reason}


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]}
