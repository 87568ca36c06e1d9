"""What the engine gives for every token: ids and numbers, no text."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.runtime.core.sequence import FinishReason


@dataclass(slots=True)
class TokenOutput:
    """One new token of one answer, and whether the answer ends with it. An error may end it without a token.

    Nobody changes one; frozen, it would take three times as long to make.
    """

    request: int
    index: int  # which of the n answers
    token: int | None
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    finished: FinishReason | None = None
    stop_reason: int | str | None = None  # the token that ended it, where not the model's own; what went wrong
