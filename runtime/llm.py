"""`quantkit.LLM`: a model folder in, answers out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.progress import Progress, silent
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import FinishReason
from quantkit.runtime.engine.engine import Delta, Engine, Request
from quantkit.runtime.output.progress_bar import Advance, progress_bar
from quantkit.runtime.startup import Stages, start_engine

Prompt = str | Sequence[int]  # text, or token ids
Message = dict[str, Any]  # {"role": ..., "content": ...}


@dataclass
class Answer:
    """One of the n answers to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None  # of the chosen tokens
    top_logprobs: list[list[tuple[int, float]]] | None = None  # of the most probable tokens at each position
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        if delta.token is not None:
            self.token_ids.append(delta.token)
        if delta.logprob is not None:
            self.logprobs = [*(self.logprobs or []), delta.logprob]
            self.top_logprobs = [*(self.top_logprobs or []), delta.top or []]
        self.finish_reason, self.stop_reason = delta.finished, delta.stop_reason


@dataclass
class Generation:
    """A prompt and its answers."""

    prompt_token_ids: list[int]
    answers: list[Answer]
    prompt: str | None = None
    prompt_logprobs: list[float | None] | None = None  # None for the first token, which nothing predicts
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
    cached_tokens: int = 0  # of the prompt, found in the cache

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.answers[0].text


class LLM:
    """Loads a model once and answers prompts, many at a time.

    `model` is a folder, a hub name or `demo`; options are those of `EngineOptions`, such as device="cuda",
    max_context=4096, kv_dtype="fp8".
    """

    def __init__(self, model: str | Path, *, on_block: Progress = silent, **options: Any) -> None:
        self.stages = Stages()
        self.engine: Engine = start_engine(model, EngineOptions(**options), on_block=on_block, stages=self.stages)

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
        requests: list[Request] = []
        try:
            for tokens, one in zip(ids, each, strict=True):
                requests.append(self.engine.add(tokens, one))
            with progress_bar(sum(one.n for one in each)) if progress else nullcontext(_ignore) as advance:
                answers = self._run(requests, advance)
        except BaseException:  # a wrong prompt, an interrupt: leave nothing behind
            for request in requests:
                self.engine.abort(request.id)
            raise
        return [
            _generation(request, answers[request.id], prompt)
            for request, prompt in zip(requests, given, strict=True)
        ]  # fmt: skip

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The tokens of one prompt as they come; leaving the loop ends the request."""
        request = self.engine.add(self.encode(prompt), params or SamplingParams())
        try:
            while not request.finished:
                for delta in self.engine.step():
                    if delta.request == request.id:
                        yield delta
        finally:
            self.engine.abort(request.id)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Generation:
        """The answer to a conversation, through the tokenizer's chat template."""
        return self.generate([self.encode_chat(messages)], params)[0]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        if not isinstance(prompt, str | Sequence):
            raise InputError(f"a prompt is {prompt!r}, but must be a text or a list of token ids")
        if not isinstance(prompt, str):
            return list(prompt)
        if self.engine.tokenizer is None:
            raise InputError("this model folder has no tokenizer; give token ids instead of text")
        return list(self.engine.tokenizer(prompt)["input_ids"])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        tokenizer = self.engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise InputError("this model's tokenizer has no chat template; give plain prompts")
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def close(self) -> None:
        """Ends the other processes of an LLM with tensor_parallel or pipeline_parallel; it also ends with this one."""
        self.engine.close()

    def _run(self, requests: list[Request], advance: Advance) -> dict[int, list[Answer]]:
        answers = {request.id: [Answer(index) for index in range(request.params.n)] for request in requests}
        while any(not request.finished for request in requests):
            deltas = [delta for delta in self.engine.step() if delta.request in answers]
            for delta in deltas:
                answers[delta.request][delta.index].add(delta)
            advance(len(deltas), sum(delta.finished is not None for delta in deltas))
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
