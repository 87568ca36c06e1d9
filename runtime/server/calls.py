"""One request of a client on its way through the engine: its place, its time limit, its end.

    enter the queue -> submit prompts -> pieces -> (finished | the client left | time is up | the engine died) -> close

However it ends, `close` gives everything back: the engine's request, the place in the queue, the numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.sampling.structured_output import GuideSpec
from quantkit.runtime.server.access import Place, Queue
from quantkit.runtime.server.answering import EngineDied
from quantkit.runtime.server.answers import Answers, Piece, merged
from quantkit.runtime.server.engine_client import EngineClient, EngineInfo
from quantkit.runtime.server.errors import ApiError
from quantkit.runtime.server.logprobs import TokenTexts
from quantkit.runtime.server.prompts import Prompts
from quantkit.runtime.server.request_log import note, note_accepted

if TYPE_CHECKING:
    from quantkit.runtime.server.metrics import ServerMetrics
    from quantkit.runtime.server.settings import ServerSettings
    from quantkit.runtime.server.shadow import ShadowWatch

Result = TypeVar("Result")
CLIENT_LEFT = 499  # nginx's status for it; nobody receives it, the log does


class ClientLeft(ApiError):
    """The client closed the connection before its answer was complete."""

    def __init__(self) -> None:
        super().__init__(CLIENT_LEFT, "the client closed the connection", code="client_left")


@dataclass(frozen=True)
class Service:
    """What every handler needs to answer with one model."""

    settings: ServerSettings
    client: EngineClient
    prompts: Prompts
    metrics: ServerMetrics
    queue: Queue
    names: tuple[str, ...]  # of the model, as clients ask for it
    started: int  # when, as a Unix time
    token_texts: TokenTexts
    shadow: ShadowWatch | None = None

    @property
    def info(self) -> EngineInfo:
        if self.client.info is None:
            raise EngineDied("the engine is not ready yet; try again in a moment")
        return self.client.info

    @property
    def fingerprint(self) -> str:
        """Changes with everything that may change an answer to the same request."""
        info = self.info
        parts = (package_version(), info.model, info.format, info.device, info.dtype, info.kv_dtype)
        return "qk_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


class Call:
    """One accepted request."""

    def __init__(self, service: Service, request: Request, kind: str, model: str, answers: int) -> None:
        if not service.client.ready:
            raise EngineDied("the engine is not ready; try again in a moment")
        self.service = service
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.model = model
        self.created = int(time.time())
        self.arrived = time.monotonic()
        self.sources: list[Answers] = []
        self.finish_reason = "abort"  # unless it turns out otherwise
        self._request = request
        self._place: Place = service.queue.enter(answers)
        self._closed = False
        self._seconds = service.settings.request_timeout_seconds
        self._deadline = asyncio.get_running_loop().time() + self._seconds

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        guide: GuideSpec | None = None,
        no_text: bool = False,
    ) -> None:
        info, tokenizer = self.service.info, self.service.prompts.tokenizer
        for number, prompt in enumerate(prompts):
            if len(prompt) >= info.max_context:
                raise _too_long(len(prompt), info.max_context)
            answering = self.service.client.submit(prompt, params, priority=priority, guide=guide)
            source = Answers(
                answering, prompt, params, tokenizer, info.eos, self.service.metrics, self.arrived, number, no_text
            )
            self.sources.append(source)
        self.service.metrics.request_started()
        note_accepted(self._request.scope)

    def pieces(self) -> AsyncGenerator[Piece, None]:
        return merged(self.sources)

    async def watched(self, work: Awaitable[Result]) -> Result:
        """Waits for work as long as the client does, and no longer than the limit."""
        task = asyncio.ensure_future(work)
        left = asyncio.ensure_future(client_left(self._request.receive))
        try:
            async with self.limit():
                await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientLeft
            return task.result()
        finally:
            await end_tasks(task, left)

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
        cached = sum(source.answering.cached_tokens for source in self.sources)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.service.info.speculates:
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
        return self.service.token_texts

    def close(self, error: BaseException | None = None) -> None:
        """Gives back what is still held; once is enough, twice is harmless."""
        if self._closed:
            return
        self._closed = True
        for source in self.sources:
            source.answering.abort()
        self._place.leave()
        if error is None and self.service.shadow is not None:
            for source in self.sources:
                for tokens in source.finished_tokens:
                    self.service.shadow.offer(list(source.prompt), tokens)
        if error is not None and not isinstance(error, ClientLeft | asyncio.CancelledError):
            self.finish_reason = "error"
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        usage = self.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        told: dict[str, Any] = {"model": self.model}
        if isinstance(error, Exception):
            told["error"] = error.code if isinstance(error, ApiError) else type(error).__name__
        if self.sources:
            self.service.metrics.request_finished(
                self.finish_reason,
                usage["prompt_tokens"],
                cached,
                usage["completion_tokens"],
                time.monotonic() - self.arrived,
            )
            told |= {
                "queued_seconds": self.sources[0].answering.queued_seconds,
                "first_token_seconds": self.sources[0].first_token_seconds,
                "prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": cached,
                "generated_tokens": usage["completion_tokens"],
                "finish_reason": self.finish_reason,
            }
        note(self._request.scope, **told)


async def client_left(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels what is not done, and waits until it is."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@cache
def package_version() -> str:
    try:
        return version("quantkit")
    except PackageNotFoundError:  # run from a folder that was never installed
        return "unknown"


def _too_long(tokens: int, limit: int) -> ApiError:
    message = f"the prompt has {tokens} tokens, but contexts end at {limit}, the answer included; shorten it"
    return ApiError(400, message, code="context_length_exceeded")
