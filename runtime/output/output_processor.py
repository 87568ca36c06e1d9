"""Tokens of the engine in, text out: for `LLM`, for the server, and for whoever else drives an engine.

    TokenOutput --OutputProcessor--> TextOutput        a stop string --abort--> the engine

The engine ends an answer at an end token, at its length, or where its guide is finished. Stop strings are found here:
the engine is told at once, and computes the other answers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import InputError
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import FinishReason
from quantkit.runtime.core.token_output import TokenOutput
from quantkit.runtime.output.detokenizer import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TextOutput:
    """One new token of one answer, the text that it made complete, and whether the answer ends with it."""

    request: int
    index: int  # which of the n answers
    token: int | None
    text: str = ""
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    finished: FinishReason | None = None
    stop_reason: int | str | None = None  # the token or string that ended it, where that was not the model's own end


class OutputProcessor:
    """The text of the n answers to one prompt, and why each of them ends."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt: Sequence[int],
        params: SamplingParams,
        eos: Sequence[int],
        abort: Callable[[int], None],
    ) -> None:
        """Without a tokenizer, texts stay empty. `eos` are the model's own end tokens.

        `abort` is called with the index of an answer that a stop string has ended: the engine shall stop computing it.
        """
        if params.stop and tokenizer is None:
            raise InputError("stop strings need a tokenizer, which this model folder lacks; use stop_token_ids")
        self.end_tokens = frozenset(params.end_tokens(eos))
        self._abort = abort
        self._ended: set[int] = set()
        self._streams = [None if tokenizer is None else _stream(tokenizer, prompt, params) for _ in range(params.n)]

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return len(self._ended) == len(self._streams)

    def process(self, output: TokenOutput) -> TextOutput | None:
        """None for a token after a stop string, which was computed before the engine knew."""
        if output.index in self._ended:
            return None
        stream = self._streams[output.index]
        text = "" if stream is None else self._new_text(stream, output)
        finished: FinishReason | None = output.finished
        stop_reason: int | str | None = output.stop_reason
        if stream is not None and stream.stopped:
            finished, stop_reason = "stop", stream.stop_reason
        if finished is not None:
            text += "" if stream is None else stream.finish()
            self._ended.add(output.index)
            if output.finished is None:
                self._abort(output.index)
        return TextOutput(
            output.request, output.index, output.token, text, output.logprob, output.top, finished, stop_reason
        )

    def _new_text(self, stream: TextStream, output: TokenOutput) -> str:
        """An end token has no text, and neither has one that the guide refused."""
        if output.token is None or output.token in self.end_tokens or output.finished == "error":
            return ""
        return stream.push(output.token)


def _stream(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], params: SamplingParams) -> TextStream:
    return TextStream(
        tokenizer,
        prompt_ids=prompt,
        stop=params.stop,
        include_stop=params.include_stop,
        skip_special_tokens=params.skip_special_tokens,
    )
