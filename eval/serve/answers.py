"""One streamed answer as the client saw it: when its tokens came, how many there were, or why there is none."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

MALFORMED, DISCONNECT, TIMEOUT, CONNECT, ERROR_EVENT = (
    "malformed event",
    "disconnect",
    "timeout",
    "connect",
    "error event",
)
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


class Failure(Exception):
    """Why a request got no whole answer: a kind to count by, and a message for people."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class Answer:
    """Times are seconds of one clock. Without `error` the answer is whole."""

    sent: float
    end: float
    stamps: array[float] = field(default_factory=lambda: array("d"))  # of each event that brought a token
    finish: float | None = None  # when the reason of its end came, which is with or right after the last token
    output_tokens: int | None = None  # as the server counted them; None where it did not say
    prompt_tokens: int | None = None
    error: str | None = None  # a kind
    message: str = ""

    @property
    def tokens(self) -> int:
        """The server's count where it gives one; else every event is taken for a token."""
        return len(self.stamps) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float:
        """Until the first token; an answer without text shows itself by its end."""
        return (self.stamps[0] if self.stamps else self.end) - self.sent

    @property
    def e2e(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Time for each token after the first; None where there is no second one.

        It counts to the answer's end, not to its last event with text: special tokens at the end may have none.
        """
        if not self.stamps or self.tokens < 2:
            return None
        last = self.stamps[-1] if self.finish is None else self.finish
        return (last - self.stamps[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]


class AnswerReader:
    """Takes the events of one answer, in order."""

    def __init__(self, sent: float) -> None:
        self._sent = sent
        self._stamps: array[float] = array("d")
        self._usage: dict[str, Any] = {}
        self._finish: float | None = None  # when a choice gave its reason
        self._done = False  # the stream said that nothing follows
        self._end = sent

    def see(self, data: bytes, now: float) -> None:
        """Raises Failure for an event that is none, or that reports an error."""
        self._end = now
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise Failure(MALFORMED, f"an event is not JSON: {_short(data)}") from None
        if not isinstance(event, dict):
            raise Failure(MALFORMED, f"an event is not an object: {_short(data)}")
        if event.get("error"):
            raise Failure(ERROR_EVENT, error_message(event) or _short(data))
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        self._see_choices(event.get("choices"), data, now)

    def _see_choices(self, choices: Any, data: bytes, now: float) -> None:
        if not choices:
            return
        try:
            choice = choices[0]
            if choice.get("finish_reason") is not None:
                self._finish = now
            if brings_token(choice):
                self._stamps.append(now)
        except (AttributeError, KeyError, TypeError):
            raise Failure(MALFORMED, f"an event's choices are not as they should be: {_short(data)}") from None

    def answer(self) -> Answer:
        """The whole answer. Raises Failure where the stream ended before it was."""
        if not self._done and self._finish is None:
            raise Failure(DISCONNECT, "the stream ended before the answer did")
        return self._as_answer(self._end, None, "")

    def failed(self, failure: Failure, now: float) -> Answer:
        return self._as_answer(now, failure.kind, failure.message)

    def _as_answer(self, end: float, error: str | None, message: str) -> Answer:
        tokens, prompt = (_count(self._usage.get(name)) for name in ("completion_tokens", "prompt_tokens"))
        return Answer(self._sent, end, self._stamps, self._finish, tokens, prompt, error, message)


def brings_token(choice: dict[str, Any]) -> bool:
    """Whether an event carries a token, rather than only a role or the end.

    A token may have no text of its own (half a character, a special one): an empty text that neither opens nor ends the
    answer is one.
    """
    delta = choice.get("delta")
    if delta is None:
        return bool(choice["text"]) or choice.get("finish_reason") is None
    if any(delta.get(name) for name in _TEXTS):
        return True
    return "role" not in delta and "content" in delta and choice.get("finish_reason") is None


def error_message(body: Any) -> str:
    """The message in an error of an OpenAI-compatible server; empty where there is none."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or ""
    return error if isinstance(error, str) else ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _short(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return text if len(text) <= 80 else text[:77] + "..."
