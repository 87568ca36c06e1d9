"""Pieces of answers in, TGI's objects out: whole, or an event for each token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quantkit.runtime.server.models.answer_stream import Piece
from quantkit.runtime.server.routes.call import Call
from quantkit.runtime.server.routes.event_stream import Chunks
from quantkit.runtime.server.schemas.logprobs import Scored, finite, likeliest
from quantkit.runtime.server.schemas.tgi import Finish, TgiRequest

Json = dict[str, Any]


@dataclass
class _Told:
    """One answer so far."""

    text: str = ""
    tokens: list[Scored] = field(default_factory=list)  # its end token is one of them
    reason: Finish | None = None

    def take(self, piece: Piece) -> list[Scored]:
        """The tokens of a piece."""
        new = [*piece.tokens, *([piece.end_token] if piece.end_token else [])]
        self.tokens += new
        self.text += piece.text
        if piece.finished:
            ended: Finish = "stop_sequence" if piece.stop_text else "eos_token"
            self.reason = "length" if piece.finished == "length" else ended
        return new


class TgiWriter:
    def __init__(self, call: Call, body: TgiRequest) -> None:
        self._call = call
        self._wanted = body.parameters
        self._told = [_Told(body.inputs if body.parameters.return_full_text else "") for _ in range(self._wanted.drawn)]
        self._special = frozenset(call.model.prompts.tokenizer.all_special_ids)

    async def gather(self) -> None:
        """All pieces, until the answers have ended."""
        async with aclosing(self._call.pieces()) as pieces:
            async for piece in pieces:
                self._take(piece)

    def whole(self) -> Json:
        """The object of what was gathered."""
        order = likeliest([told.tokens for told in self._told]) if len(self._told) > 1 else [0]
        best, *others = (self._told[index] for index in order)
        if not self._wanted.details:
            return {"generated_text": best.text}
        details = self._details(best)
        if self._wanted.drawn > 1:
            details["best_of_sequences"] = [{"generated_text": one.text} | self._details(one) for one in others]
        return {"generated_text": best.text, "details": details}

    async def chunks(self) -> Chunks:
        """One event for each token."""
        (told,) = self._told
        async with aclosing(self._call.pieces()) as pieces:
            async for piece in pieces:
                for scored in self._take(piece):
                    yield self._event(told, scored, piece)

    def _take(self, piece: Piece) -> list[Scored]:
        self._call.finish_reason = piece.finished or self._call.finish_reason
        return self._told[piece.index].take(piece)

    def _event(self, told: _Told, scored: Scored, piece: Piece) -> Json:
        """Texts of events together, but for special ones, are the whole text: what was kept back until an end token
        comes as its text."""
        token = self._token(scored.id, scored.logprob)
        if piece.text or not token["special"]:
            token |= {"text": piece.text, "special": False}
        event: Json = {"index": len(told.tokens), "token": token}
        if self._wanted.likeliest:
            event["top_tokens"] = self._top(scored)
        ended = {"generated_text": told.text, "details": self._stream_details(told)}
        return event | (ended if told.reason else {"generated_text": None, "details": None})

    def _stream_details(self, told: _Told) -> Json | None:
        if not self._wanted.details:
            return None
        return self._ending(told) | {"input_length": len(self._call.sources[0].prompt)}

    def _details(self, told: _Told) -> Json:
        texts = self._call.token_texts
        prompt = self._call.sources[0].prompt_tokens
        prefill = [
            {"id": one.id, "text": texts.text(one.id), "logprob": None if one.logprob is None else finite(one.logprob)}
            for one in prompt
        ]
        tokens = [self._token(one.id, one.logprob) for one in told.tokens]
        found = self._ending(told) | {"prefill": prefill, "tokens": tokens}
        return found | ({"top_tokens": [self._top(one) for one in told.tokens]} if self._wanted.likeliest else {})

    def _ending(self, told: _Told) -> Json:
        return {"finish_reason": told.reason, "generated_tokens": len(told.tokens), "seed": self._wanted.seed}

    def _top(self, scored: Scored) -> Sequence[Json]:
        return [self._token(*pair) for pair in scored.top]

    def _token(self, token_id: int, logprob: float | None) -> Json:
        text = self._call.token_texts.text(token_id)
        return {"id": token_id, "text": text, "logprob": finite(logprob), "special": token_id in self._special}
