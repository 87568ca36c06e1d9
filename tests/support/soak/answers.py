"""An answer in one form, streamed or whole, so that two of them can be compared."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from soak.cases import Case
from soak.wire import Reply, as_json_request, connection, events, post, read_status

ROUNDING = 1e-3  # of log-probabilities: a step with other sequences rounds otherwise


@dataclass(frozen=True)
class Choice:
    text: str
    finish_reason: str | None
    tokens: tuple[str, ...]  # where log-probabilities were asked for
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Answer:
    choices: tuple[Choice, ...]
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Failure:
    """What a client got instead of an answer."""

    status: int  # 200 where the stream had begun
    code: str


def same(one: Answer, other: Answer) -> bool:
    """Texts, ends, tokens and counts are equal, log-probabilities almost."""
    return _exact(one) == _exact(other) and all(
        abs(a - b) < ROUNDING
        for mine, theirs in zip(one.choices, other.choices, strict=True)
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)
    )


def _exact(answer: Answer) -> tuple[Any, ...]:
    choices = [(one.text, one.finish_reason, one.tokens) for one in answer.choices]
    return choices, answer.prompt_tokens, answer.new_tokens


async def ask_whole(port: int, case: Case) -> Answer | Failure:
    reply = await post(port, case.path, case.body)
    if reply.status != 200:
        return Failure(reply.status, reply.code)
    grown = _GrowingAnswer()
    grown.add(reply.json)
    return grown.answer


async def ask_streamed(port: int, case: Case) -> Answer | Failure:
    body = case.body | {"stream": True, "stream_options": {"include_usage": True}}
    async with connection(port) as (reader, writer):
        writer.write(as_json_request(case.path, body))
        status = await read_status(reader)
        if status != 200:
            return Failure(status, Reply(status, await reader.read()).code)
        grown = _GrowingAnswer()
        async for event in events(reader):
            if "error" in event:
                return Failure(status, event["error"]["code"])
            grown.add(event)
        return grown.answer


class _GrowingAnswer:
    """Takes the chunks of a stream, or the one object of a whole answer."""

    def __init__(self) -> None:
        self._texts: defaultdict[int, str] = defaultdict(str)
        self._reasons: dict[int, str | None] = {}
        self._tokens: defaultdict[int, list[str]] = defaultdict(list)
        self._logprobs: defaultdict[int, list[float]] = defaultdict(list)
        self._usage: dict[str, Any] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            index = choice["index"]
            self._texts[index] += _text(choice)
            self._reasons[index] = choice["finish_reason"] or self._reasons.get(index)
            found = choice.get("logprobs") or {"tokens": [], "token_logprobs": []}
            self._tokens[index] += found["tokens"]
            self._logprobs[index] += found["token_logprobs"]

    @property
    def answer(self) -> Answer:
        choices = [
            Choice(self._texts[index], self._reasons[index], tuple(self._tokens[index]), tuple(self._logprobs[index]))
            for index in sorted(self._texts)
        ]
        return Answer(tuple(choices), self._usage["prompt_tokens"], self._usage["completion_tokens"])


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    said = choice.get("delta") or choice.get("message") or {}
    return said.get("content") or ""
