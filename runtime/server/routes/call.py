"""One request of a client on its way through the engine: its room in the queue, its time limit, its end.

    enter the queue -> submit prompts -> pieces -> (finished | the client left | time is up | the engine died) -> close

However it ends, `close` gives everything back: the engine's request, the room in the queue, the numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.sampling.structured_output import GuideSpec
from quantkit.runtime.server.engine_process.pending import EngineDied
from quantkit.runtime.server.errors import TOO_LONG, ApiError, CannotAnswer
from quantkit.runtime.server.logs import note, note_accepted
from quantkit.runtime.server.models.admission import Ticket
from quantkit.runtime.server.models.answer_stream import AnswerStream, Piece, merged
from quantkit.runtime.server.models.registry import registry
from quantkit.runtime.server.models.routing import Attempt
from quantkit.runtime.server.schemas.logprobs import TokenTexts
from quantkit.runtime.server.tracing import TracedRequest

Result = TypeVar("Result")
_OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion", "tgi": "text_completion"}  # OpenTelemetry's words
CLIENT_LEFT = 499  # nginx's status for it; nobody receives it, the log does


class ClientLeft(ApiError):
    """The client closed the connection before its answer was complete."""

    def __init__(self) -> None:
        super().__init__(CLIENT_LEFT, "the client closed the connection", code="client_left")


class Call:
    """One accepted request."""

    def __init__(self, attempt: Attempt, request: Request, kind: str, answers: int) -> None:
        self.model = model = attempt.model
        if not model.client.ready:
            raise EngineDied(model.client.why_not_ready)
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.model_name = attempt.name
        self.created = int(time.time())
        self.arrived = attempt.arrived
        self.submitted: float | None = None
        self.sources: list[AnswerStream] = []
        self.finish_reason = "abort"  # unless it turns out otherwise
        self._attempt = attempt
        self._request = request
        self._ticket: Ticket = model.queue.enter(answers)
        self._closed = False
        self._seconds = model.settings.request_timeout_seconds
        spent = time.monotonic() - self.arrived
        self._deadline = asyncio.get_running_loop().time() + self._seconds - spent

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        guide: GuideSpec | None = None,
        no_text: bool = False,
        one_by_one: bool = False,
    ) -> None:
        info, tokenizer = self.model.info, self.model.prompts.tokenizer
        _check_room(max(map(len, prompts)), self._attempt.room_for_answer(params.max_tokens), info.max_context)
        for number, prompt in enumerate(prompts):
            pending = self.model.client.submit(prompt, params, priority=priority, guide=guide)
            source = AnswerStream(
                pending, prompt, params, tokenizer, info.eos, self.model.metrics, self.arrived, number, no_text,
                one_by_one,
            )  # fmt: skip
            self.sources.append(source)
        self.submitted = time.monotonic()
        self.model.metrics.request_started()
        self._attempt.accepted()
        note_accepted(self._request.scope)

    def pieces(self) -> AsyncGenerator[Piece, None]:
        return merged(self.sources)

    async def watched(self, work: Awaitable[Result]) -> Result:
        """Waits for work as long as the client does, and no longer than the limit."""
        async with self.limit():
            return await while_connected(self._request, work)

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncGenerator[None, None]:
        """The time limit of the server, as an error that says so."""
        try:
            async with asyncio.timeout_at(self._deadline):
                yield
        except TimeoutError:
            message = f"the answer took longer than {self._seconds:g} s, the limit of this server; ask for fewer tokens"
            raise ApiError(504, message, code="timeout") from None

    @property
    def usage(self) -> dict[str, Any]:
        prompt = sum(len(source.prompt) for source in self.sources)
        generated = sum(source.generated for source in self.sources)
        cached = sum(source.pending.cached_tokens for source in self.sources)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.model.info.speculates:
            usage["completion_tokens_details"] = self._predicted()
        return usage

    def _predicted(self) -> dict[str, int]:
        """OpenAI's names for tokens that somebody guessed. Rejected ones are not among the completion's tokens."""
        found = [source.predicted for source in self.sources]
        return {
            "accepted_prediction_tokens": sum(accepted for accepted, _ in found),
            "rejected_prediction_tokens": sum(rejected for _, rejected in found),
        }

    @property
    def token_texts(self) -> TokenTexts:
        return self.model.token_texts

    def close(self, error: BaseException | None = None) -> None:
        """Gives back what is still held; once is enough, twice is harmless."""
        if self._closed:
            return
        self._closed = True
        for source in self.sources:
            source.pending.abort()
        self._ticket.leave()
        if error is None and self.model.shadow is not None:
            for source in self.sources:
                for tokens in source.finished_tokens:
                    self.model.shadow.offer(list(source.prompt), tokens)
        if error is not None and not isinstance(error, ClientLeft | asyncio.CancelledError):
            self.finish_reason = "error"
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        usage = self.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        told: dict[str, Any] = {"model": self.model_name, "error": _word_for(error)}
        if self._attempt.virtual is not None:
            told |= {"virtual_model": self._attempt.virtual, "routing_reason": self._attempt.reason}
        if self.sources:
            self.model.metrics.request_finished(
                self.finish_reason,
                usage["prompt_tokens"],
                cached,
                usage["completion_tokens"],
                time.monotonic() - self.arrived,
            )
            told |= {
                "queued_seconds": self.sources[0].pending.queued_seconds,
                "first_token_seconds": self.sources[0].first_token_seconds,
                "prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": cached,
                "generated_tokens": usage["completion_tokens"],
                "finish_reason": self.finish_reason,
            }
        note(self._request.scope, **told)
        traces = registry(self._request).traces
        passed_on = self.submitted is None and self._attempt.passes_on(error)
        if traces is not None and not passed_on:
            traces.record(self._traced(usage, told["error"]))

    def _traced(self, usage: dict[str, Any], error: str | None) -> TracedRequest:
        source = self.sources[0] if self.sources else None
        params = None if source is None else source.params
        ended = time.monotonic() - self.arrived
        submitted = None if self.submitted is None else self.submitted - self.arrived
        queued = None if source is None else source.pending.queued_seconds
        return TracedRequest(
            operation=_OPERATIONS[self.id.partition("-")[0]],
            model=self._attempt.asked_for,
            headers=self._request.headers,
            arrived=time.time_ns() - int(ended * 1e9),
            submitted=submitted,
            scheduled=None if submitted is None or queued is None else submitted + queued,
            first_token=None if source is None else source.first_token_seconds,
            ended=ended,
            error=error,
            attributes={
                "gen_ai.response.id": self.id,
                "gen_ai.response.model": self.model_name,
                "gen_ai.response.finish_reasons": [self.finish_reason] if source is not None else None,
                "gen_ai.usage.input_tokens": usage["prompt_tokens"],
                "gen_ai.usage.output_tokens": usage["completion_tokens"],
                "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "gen_ai.request.max_tokens": None if params is None else params.max_tokens,
                "gen_ai.request.temperature": None if params is None else params.temperature,
                "gen_ai.request.top_p": None if params is None else params.top_p,
                "gen_ai.request.choice.count": None if params is None else params.n,
            },
        )


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """Waits for work as long as the client does; raises ClientLeft."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(client_left(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        await end_tasks(task, left)


async def client_left(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels what is not done, and waits until it is."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _check_room(tokens: int, answer: int, limit: int) -> None:
    """Of the longest prompt and its answer, as far as this must fit."""
    if tokens >= limit:
        message = f"the prompt has {tokens} tokens, but contexts end at {limit}, the answer included; shorten it"
        raise CannotAnswer(message, code=TOO_LONG)
    if tokens + answer > limit:
        message = f"the prompt has {tokens} tokens and the answer may have {answer}, but contexts end at {limit}"
        raise CannotAnswer(f"{message}; shorten the one or the other", code=TOO_LONG)


def _word_for(error: BaseException | None) -> str | None:
    if isinstance(error, ApiError):
        return error.code
    return type(error).__name__ if isinstance(error, Exception) else None
