"""POST /v1/completions: plain continuations of one prompt or many."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from quantkit.runtime.server.errors import documented
from quantkit.runtime.server.logs import note
from quantkit.runtime.server.models.answer_stream import AnswerStream
from quantkit.runtime.server.models.routing import Attempt, routed
from quantkit.runtime.server.models.served_model import ServedModel
from quantkit.runtime.server.routes.call import Call
from quantkit.runtime.server.routes.event_stream import Chunks, start_stream
from quantkit.runtime.server.schemas.logprobs import Scored, completion_logprobs, likeliest
from quantkit.runtime.server.schemas.requests import CompletionRequest
from quantkit.runtime.server.schemas.responses import Completion, answer_or_stream
from quantkit.runtime.server.schemas.sampling import completion_params, guide_of

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/completions",
    response_class=JSONResponse,
    responses={**answer_or_stream(Completion), **documented(400, 401, 404, 408, 413, 429, 500, 503, 504)},
)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continues a text, or several."""
    return await routed(request, body, lambda attempt: _answer(attempt, body, request))


async def _answer(attempt: Attempt, body: CompletionRequest, request: Request) -> Response:
    model = attempt.model
    params = completion_params(body, model.settings.watermark_key)
    given = _prompts(body.prompt)
    note(request.scope, stream=bool(body.stream))
    call = Call(attempt, request, "cmpl", len(given) * params.n)
    try:
        guide = await model.prompts.in_thread(lambda: guide_of(body))
        prompts = await call.watched(_encoded(model, given))
        if model.settings.log_prompts:
            note(request.scope, prompt="\n".join([await model.prompts.decode(ids) for ids in prompts]))
        call.submit(prompts, params, priority=body.priority or 0, guide=guide, no_text=body.max_tokens == 0)
        echoed = [await _echo(model, prompt, ids) for prompt, ids in zip(given, prompts, strict=True)]
        writer = _Writer(call, body, params.n, echoed if body.echo else [""] * len(given))
        if body.stream:
            return await start_stream(call, writer.chunks())
        await call.watched(writer.gather())
        response = await model.prompts.in_thread(lambda: JSONResponse(writer.whole()))  # long with a prompt's logprobs
    except BaseException as error:
        call.close(error)
        raise
    call.close()
    return response


def _prompts(prompt: Any) -> list[str | list[int]]:
    """A text or a list of token ids is one prompt."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


async def _encoded(model: ServedModel, given: Sequence[str | list[int]]) -> list[list[int]]:
    return [await model.prompts.encode(one) if isinstance(one, str) else one for one in given]


async def _echo(model: ServedModel, prompt: str | list[int], ids: list[int]) -> str:
    return prompt if isinstance(prompt, str) else await model.prompts.decode(ids)


class _Writer:
    """Pieces in, OpenAI's objects out."""

    def __init__(self, call: Call, body: CompletionRequest, drawn: int, echoed: Sequence[str]) -> None:
        """`drawn` answers come for each prompt, at least as many as are wanted."""
        self._call = call
        self._body = body
        self._echoed = echoed
        self._head = {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": call.model_name,
            "system_fingerprint": call.model.fingerprint,
        }
        # Of every prompt and each of its answers.
        self._texts = [[echo] * drawn for echo in echoed]
        self._tokens: list[list[list[Scored]]] = [[[] for _ in row] for row in self._texts]
        self._reasons: list[list[str | None]] = [[None for _ in row] for row in self._texts]
        self._ends: list[list[Scored | None]] = [[None for _ in row] for row in self._texts]

    async def gather(self) -> None:
        """All pieces, until the answers have ended."""
        texts, tokens, reasons = self._texts, self._tokens, self._reasons
        async with aclosing(self._call.pieces()) as pieces:
            async for piece in pieces:
                texts[piece.prompt][piece.index] += piece.text
                tokens[piece.prompt][piece.index] += piece.tokens
                if piece.finished:
                    reasons[piece.prompt][piece.index] = self._call.finish_reason = piece.finished
                    self._ends[piece.prompt][piece.index] = piece.end_token

    def whole(self) -> dict[str, Any]:
        """The object of what was gathered."""
        choices: list[dict[str, Any]] = []
        for number, source in enumerate(self._call.sources):
            for index in self._best(number):
                text, scored = self._texts[number][index], self._tokens[number][index]
                reason = self._reasons[number][index]
                choices.append(self._choice(len(choices), text, self._whole_logprobs(source, scored), reason))
        return self._head | {"choices": choices, "usage": self._call.usage}

    def _best(self, number: int) -> Sequence[int]:
        """The answers to a prompt that are given: all, or the likeliest of those that were drawn."""
        if len(self._texts[number]) == self._body.answers:
            return range(self._body.answers)
        ended = zip(self._tokens[number], self._ends[number], strict=True)
        return likeliest([[*tokens, end] if end else tokens for tokens, end in ended])[: self._body.answers]

    async def chunks(self) -> Chunks:
        head = self._head | ({"usage": None} if self._body.wants_usage else {})
        started: set[int] = set()
        offsets: dict[int, int] = {}
        async with aclosing(self._call.pieces()) as pieces:
            async for piece in pieces:
                index = piece.prompt * self._body.answers + piece.index
                text = piece.text
                if index not in started:
                    started.add(index)
                    text = self._echoed[piece.prompt] + text
                logprobs = None
                if self._body.logprobs is not None:
                    logprobs = completion_logprobs(piece.tokens, self._call.token_texts, offsets.get(index, 0))
                    offsets[index] = offsets.get(index, 0) + sum(map(len, logprobs["tokens"]))
                self._call.finish_reason = piece.finished or self._call.finish_reason
                yield head | {"choices": [self._choice(index, text, logprobs, piece.finished)]}
        if self._body.wants_usage:
            yield head | {"choices": [], "usage": self._call.usage}

    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:  # fmt: skip
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _whole_logprobs(self, source: AnswerStream, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        before = source.prompt_tokens if self._body.echo else []
        return completion_logprobs([*before, *scored], self._call.token_texts)
