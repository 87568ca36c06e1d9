"""`quantkit.LLM`: a model folder in, answers out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.progress import Progress, silent
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.token_output import TokenOutput
from quantkit.runtime.engine.engine import Engine, Request
from quantkit.runtime.output.answers import Answer, Generation
from quantkit.runtime.output.output_processor import OutputProcessor, TextOutput
from quantkit.runtime.output.progress_bar import Advance, progress_bar
from quantkit.runtime.output.prompts import Message, Prompt, encode_chat, encode_prompt
from quantkit.runtime.output.tokenizer import load_tokenizer
from quantkit.runtime.startup import Stages, start_engine
from quantkit.sources import model_folder


@dataclass
class _Open:
    """A request that is being answered, and what has come that its caller has not taken."""

    request: Request
    processor: OutputProcessor
    outputs: deque[TextOutput] = field(default_factory=deque)

    def taken(self) -> Iterator[TextOutput]:
        while self.outputs:
            yield self.outputs.popleft()


class LLM:
    """Loads a model once and answers prompts, many at a time.

    `model` is a folder, a hub name or `demo`; options are those of `EngineOptions`, such as device="cuda",
    max_context=4096, kv_dtype="fp8".
    """

    def __init__(self, model: str | Path, *, on_block: Progress = silent, **options: Any) -> None:
        self.stages = Stages()
        self.engine: Engine = start_engine(model, EngineOptions(**options), on_block=on_block, stages=self.stages)
        with self.stages.stage("tokenizer"):
            self.tokenizer = load_tokenizer(model_folder(model))
        self._open: dict[int, _Open] = {}  # by the engine's id of the request

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Generation]:
        """Answers in the order of the prompts. One `params` serves all prompts, or each has its own.

        `progress` shows a bar on stderr, with answers done and tokens per second.
        """
        given = _as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(given)
        if len(each) != len(given):
            raise InputError(f"{len(given)} prompts, but {len(each)} sampling parameters; give one, or one for each")
        ids = [self.encode(prompt) for prompt in given]
        opened: list[_Open] = []
        try:
            for tokens, one in zip(ids, each, strict=True):
                opened.append(self._add(tokens, one))
            with progress_bar(sum(one.n for one in each)) if progress else nullcontext(_ignore) as advance:
                answers = self._run(opened, advance)
        finally:  # also after a wrong prompt or an interrupt: leave nothing behind
            for request in opened:
                self._forget(request)
        return [
            _generation(done.request, found, prompt)
            for done, found, prompt in zip(opened, answers, given, strict=True)
        ]  # fmt: skip

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TextOutput]:
        """The tokens of one prompt as they come; leaving the loop ends the request."""
        opened = self._add(self.encode(prompt), params or SamplingParams())
        try:
            while True:
                yield from opened.taken()
                if opened.request.finished:
                    return
                self._step()
        finally:
            self._forget(opened)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Generation:
        """The answer to a conversation, through the tokenizer's chat template."""
        return self.generate([self.encode_chat(messages)], params)[0]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        return encode_prompt(self.tokenizer, prompt)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return encode_chat(self.tokenizer, messages)

    def close(self) -> None:
        """Ends the other processes of an LLM with tensor_parallel or pipeline_parallel; it also ends with this one."""
        self.engine.close()

    def _add(self, prompt: list[int], params: SamplingParams) -> _Open:
        request = self.engine.add(prompt, params)
        abort = partial(self.engine.abort, request.id)
        try:
            processor = OutputProcessor(self.tokenizer, prompt, params, self.engine.config.eos, abort)
        except InputError:
            abort()
            raise
        opened = self._open[request.id] = _Open(request, processor)
        return opened

    def _forget(self, opened: _Open) -> None:
        """Ends a request that is not finished."""
        self._open.pop(opened.request.id, None)
        self.engine.abort(opened.request.id)

    def _step(self) -> None:
        """One step of the engine: every request gets what is its own, whoever asked for the step."""
        try:
            outputs = self.engine.step()
        except BaseException as error:  # an interrupt too: what the step should have written must not be believed
            with suppress(AssertionError):
                self._deliver(self.engine.recover(f"another request's step failed: {error!r}"))
            raise
        self._deliver(outputs)

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            opened = self._open.get(output.request)
            found = None if opened is None else opened.processor.process(output)
            if opened is not None and found is not None:
                opened.outputs.append(found)

    def _run(self, requests: list[_Open], advance: Advance) -> list[list[Answer]]:
        """The answers to each request."""
        answers = [[Answer(index) for index in range(one.request.params.n)] for one in requests]
        while any(not one.request.finished for one in requests):
            self._step()
            tokens = ended = 0
            for one, found in zip(requests, answers, strict=True):
                for output in one.taken():
                    found[output.index].add(output)
                    tokens, ended = tokens + 1, ended + (output.finished is not None)
            advance(tokens, ended)
        return answers


def _ignore(tokens: int, finished: int) -> None:
    """Nobody watches."""


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A text or a list of token ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InputError(f"prompts are {prompts!r}, but must be a text, a list of token ids, or a list of these")
    if any(isinstance(item, int | float) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _generation(request: Request, answers: list[Answer], prompt: Prompt) -> Generation:
    done = Generation(request.prompt, answers, prompt if isinstance(prompt, str) else None)
    done.cached_tokens = request.sequences[0].num_reused
    if request.params.prompt_logprobs is not None:
        parts = request.prompt_logprobs
        done.prompt_logprobs = [None, *(value for part in parts for value in part.logprobs)]
        done.prompt_top_logprobs = [[], *(row for part in parts for row in part.top)]
    return done
