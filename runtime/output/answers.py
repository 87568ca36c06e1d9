"""What `LLM` and `AsyncLLM` give back: a prompt and its answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from quantkit.runtime.core.sequence import FinishReason
from quantkit.runtime.output.output_processor import TextOutput


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

    def add(self, output: TextOutput) -> None:
        self.text += output.text
        if output.token is not None:
            self.token_ids.append(output.token)
        if output.logprob is not None:
            self.logprobs = [*(self.logprobs or []), output.logprob]
            self.top_logprobs = [*(self.top_logprobs or []), output.top or []]
        self.finish_reason, self.stop_reason = output.finished, output.stop_reason


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
