"""Why an answer ends, as far as tokens tell."""

from __future__ import annotations

from quantkit.errors import QuantkitError
from quantkit.runtime.core.sequence import FinishReason, Sequence


def why_ends(sequence: Sequence, token: int, eos: tuple[int, ...]) -> tuple[FinishReason | None, int | str | None]:
    """Why a sequence ends with this token (None: it goes on), and what brought it about: an end token that is not the
    model's own, or what went wrong."""
    if token in sequence.end_tokens:
        return "stop", None if token in eos else token
    if sequence.guide is not None:
        try:
            sequence.guide.advance(token)
            if sequence.guide.finished:
                return "stop", None
        except QuantkitError as error:  # the grammar became too complex: the answer cannot be trusted
            return "error", str(error)
    if len(sequence.tokens) - len(sequence.prompt) >= sequence.max_new:
        return "length", None
    return None, None
