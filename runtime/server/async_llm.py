"""`quantkit.AsyncLLM`: many requests at once from one event loop, each an async iterator of its tokens.

The engine is the server's: a process of its own, which is watched over and started again when it dies.

    async with quantkit.AsyncLLM("demo-w4") as llm:
        async for piece in llm.generate("The function returns"):
            print(piece.text, end="")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from quantkit.errors import QuantkitError
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.output.answers import Answer, Generation
from quantkit.runtime.output.output_processor import OutputProcessor, TextOutput
from quantkit.runtime.output.prompts import Message, Prompt, encode_chat, encode_prompt
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.runtime.server.engine_process.client import EngineClient, EngineInfo, EngineStats
from quantkit.runtime.server.engine_process.pending import EngineDied, PendingRequest
from quantkit.sources import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quantkit.runtime.sampling.structured_output import GuideSpec


class AsyncLLM:
    """Loads a model once, in another process, and answers prompts as they come.

    `model` and `options` are those of `LLM`. Use it as `async with`, or call `start` and `close`. A request ends early
    when its iterator is closed or the task that reads it is cancelled; its memory is free a step later.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        EngineOptions(**options)  # refuses here what the process would refuse
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._folder = model_folder(model)
        self._client = EngineClient(str(model), options)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Returns when the engine is ready; raises what kept it from starting."""
        self.tokenizer = await asyncio.to_thread(load_tokenizer, self._folder)
        await self._client.start()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Waits for open requests as long as that, then ends the engine's process."""
        await self._client.close(drain_seconds)

    @property
    def info(self) -> EngineInfo:
        """What is loaded: format, device, context, room in the cache."""
        if self._client.info is None:
            raise EngineDied("the engine was not started; use `async with`, or await start() first")
        return self._client.info

    @property
    def stats(self) -> EngineStats:
        """The newest numbers of the engine: requests that run and wait, pages in use, tokens."""
        return self._client.stats

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        guide: GuideSpec | None = None,
    ) -> AsyncGenerator[TextOutput, None]:
        """The tokens of all answers to a prompt, with their text, as they come.

        Lower `priority` goes first. `guide` says what an answer must look like, for example
        GuideSpec("json_schema", schema). To leave the loop early and free the request at once, wrap the iterator in
        `contextlib.aclosing`.
        """
        tokens, params = encode_prompt(self.tokenizer, prompt), params or SamplingParams()
        pending, processor = self._submit(tokens, params, priority, guide)
        async with aclosing(_pieces(pending, processor)) as pieces:
            async for piece in pieces:
                yield piece

    async def answer(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        guide: GuideSpec | None = None,
    ) -> Generation:
        """The same, complete: the prompt and its answers, as `LLM.generate` gives them."""
        tokens, params = encode_prompt(self.tokenizer, prompt), params or SamplingParams()
        pending, processor = self._submit(tokens, params, priority, guide)
        answers = [Answer(index) for index in range(params.n)]
        async for piece in _pieces(pending, processor):
            answers[piece.index].add(piece)
        done = Generation(tokens, answers, prompt if isinstance(prompt, str) else None)
        done.cached_tokens = pending.cached_tokens
        if params.prompt_logprobs is not None:
            done.prompt_logprobs, done.prompt_top_logprobs = pending.prompt_logprobs, pending.prompt_top_logprobs
        return done

    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Generation:
        """The answer to a conversation, through the tokenizer's chat template."""
        return await self.answer(encode_chat(self.tokenizer, messages), params)

    def _submit(
        self, tokens: list[int], params: SamplingParams, priority: int, guide: GuideSpec | None
    ) -> tuple[PendingRequest, OutputProcessor]:
        eos = self.info.eos
        pending = self._client.submit(tokens, params, priority=priority, guide=guide)
        try:
            return pending, OutputProcessor(self.tokenizer, tokens, params, eos, pending.abort)
        except BaseException:
            pending.abort()
            raise


async def _pieces(pending: PendingRequest, processor: OutputProcessor) -> AsyncGenerator[TextOutput, None]:
    """Until every answer has ended; leaving early ends the engine's request."""
    try:
        async for output in pending:
            piece = processor.process(output)
            if piece is None:
                continue
            if piece.finished in ("error", "abort"):
                raise QuantkitError(f"the engine gave the answer up: {piece.stop_reason or 'it ended before its time'}")
            yield piece
            if processor.finished:
                return
    finally:
        pending.abort()
