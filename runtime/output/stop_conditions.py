"""The text of an answer, and why it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.errors import QuantkitError
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import FinishReason, Sequence
from quantkit.runtime.output.detokenizer import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT_TOKENS = 8  # of the prompt, that a text stream needs to place the first space


def text_stream(
    tokenizer: PreTrainedTokenizerBase | None, prompt: list[int], params: SamplingParams
) -> TextStream | None:
    """For the answer to a prompt; None without a tokenizer."""
    if tokenizer is None:
        return None
    return TextStream(
        tokenizer,
        prompt_ids=prompt[-_CONTEXT_TOKENS:],
        stop=tuple(params.stop),
        include_stop=params.include_stop,
        skip_special_tokens=params.skip_special_tokens,
    )


def why_ends(
    sequence: Sequence, token: int, stream: TextStream | None, eos: tuple[int, ...]
) -> tuple[FinishReason | None, int | str | None, str]:
    """Why a sequence ends with this token (None: it goes on), what caused it, and the text that can be shown."""
    if token in sequence.end_tokens:
        own = token in eos
        return "stop", None if own else token, stream.finish() if stream else ""
    if sequence.guide is not None:
        try:
            sequence.guide.advance(token)
        except QuantkitError:  # the grammar became too complex: the answer cannot be trusted
            return "error", None, stream.finish() if stream else ""
        if sequence.guide.finished:
            return "stop", None, (stream.push(token) + stream.finish()) if stream else ""
    text = stream.push(token) if stream else ""
    if stream is not None and stream.stopped:
        return "stop", stream.stop_reason, text
    if len(sequence.answer) >= sequence.max_new:
        return "length", None, text + (stream.finish() if stream else "")
    return None, None, text
