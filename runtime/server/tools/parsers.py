"""Tool calls in what a model writes, whole or as it comes.

    text --ToolStream--> content, and calls in the shape of OpenAI's deltas

What is no well-formed call stays content, and nothing is lost but the whitespace that sets calls apart. `parse` is the
stream fed at once, so both always agree.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError, did_you_mean
from quantkit.runtime.server.tools.syntaxes import PYTHON_TAG, SPACES, SYNTAXES, NoMatch, Position, Syntax, WrittenCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PARSERS = ("auto", *SYNTAXES, "none")


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made; `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call. The first of a call has `id` and `name` and no arguments, the others arguments only."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def as_json(self) -> dict[str, Any]:
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolPiece:
    """What a push made known."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class ToolParser:
    """Reads calls in one syntax; without one it takes everything for content."""

    def __init__(self, syntax: Syntax | None, names: Collection[str] | None = None) -> None:
        """With `names` a call of anything else is no call."""
        self.syntax = syntax
        self._names = names

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """The content and the calls of a whole answer."""
        stream = self.stream()
        return gathered([stream.push(text), stream.finish()])

    def stream(self, *, eager: bool = False) -> ToolStream:
        """With `eager` arguments come before their call is complete, so that one that is cut off cannot be taken back.

        That is right for answers under the guide of `guide_for`, which only a token limit can cut off.
        """
        return ToolStream(self.syntax, self._names, eager=eager)


class ToolStream:
    """The calls of one answer as it grows."""

    def __init__(self, syntax: Syntax | None, names: Collection[str] | None, *, eager: bool) -> None:
        self.calls_made = 0
        self._syntax = syntax
        self._names = names
        self._eager = eager
        self._position: Position = "start"
        self._text = ""
        self._index = 0  # of what is not read yet in `_text`
        self._attempt: _Attempt | None = None  # to read a call from there on
        self._pieces = _Pieces()

    def push(self, text: str) -> ToolPiece:
        """Appends text; returns what no later text can change."""
        return self._read(text, last=False)

    def finish(self) -> ToolPiece:
        """What was held back; a call that was only begun stays content."""
        return self._read("", last=True)

    def _read(self, text: str, *, last: bool) -> ToolPiece:
        if self._syntax is None:
            return ToolPiece(text)
        self._text, self._index = self._text[self._index :] + text, 0
        while self._index < len(self._text):
            attempt = self._attempt or self._begun()
            if attempt is None:
                break
            attempt.advance(self._text, self._index)
            if self._eager:
                self._send_ahead(attempt)
            if attempt.open and not last:
                break
            self._conclude(attempt)
        if last and not self.calls_made:
            self._pieces.release_spaces()
        return self._pieces.taken()

    def _begun(self) -> _Attempt | None:
        """Passes on text up to where a call may begin, and tries to read one there."""
        assert self._syntax is not None
        start = self._syntax.start(self._text, self._index, self._position)
        end = len(self._text) if start < 0 else start
        if end > self._index:
            self._add_content(self._text[self._index : end])
        self._index = end
        if start >= 0:
            self._attempt = _Attempt(self._syntax, self._position)
        return self._attempt

    def _conclude(self, attempt: _Attempt) -> None:
        """An attempt ended: with a call, or with the insight that its first character is text."""
        self._attempt = None
        text = self._text[self._index : self._index + attempt.length]
        call = self._call_in(attempt, text)
        if call is None and not attempt.sent:
            self._add_content(text[0])
            self._index += 1
            return
        if call is not None and not attempt.sent:
            self._pieces.begin_call(self.calls_made, call.name)
            self._pieces.add_arguments(self.calls_made, call.arguments)
        self._index += attempt.length
        self._position = "after call"
        self.calls_made += 1

    def _call_in(self, attempt: _Attempt, text: str) -> WrittenCall | None:
        call = attempt.syntax.read(text) if attempt.complete else None
        return call if call and (self._names is None or call.name in self._names) else None

    def _send_ahead(self, attempt: _Attempt) -> None:
        """Emits the arguments of a call as far as they are written."""
        text = self._text[self._index : self._index + attempt.length]
        name, arguments = attempt.syntax.begun_call(text)
        if name is None or (self._names is not None and name not in self._names):
            return
        if not attempt.sent:
            self._pieces.begin_call(self.calls_made, name)
        if new := arguments[attempt.sent :]:
            self._pieces.add_arguments(self.calls_made, new)
        attempt.sent = len(arguments)

    def _add_content(self, text: str) -> None:
        self._position = "in text"
        self._pieces.add_content(text, after_calls=bool(self.calls_made))


class _Attempt:
    """Reading a call at one place of the text."""

    def __init__(self, syntax: Syntax, position: Position) -> None:
        self.syntax = syntax
        self.length = 0  # characters read
        self.open = True  # whether more are needed
        self.complete = False
        self.sent = 0  # characters of its arguments that are out
        self._steps = syntax.match(position)
        next(self._steps)

    def advance(self, text: str, start: int) -> None:
        """Reads on in the text of which this is an attempt from `start` on."""
        for index in range(start + self.length, len(text)):
            if not self.open:
                return
            self.length += 1
            try:
                self._steps.send(text[index])
            except StopIteration:
                self.open, self.complete = False, True
            except NoMatch:
                self.open = False


class _Pieces:
    """What a stream has found and not handed out. Whitespace waits: beside a call it is no content."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._spaces = ""
        self._spaces_before_call: str | None = None  # of calls that no content has followed
        self._has_content = False

    def add_content(self, text: str, *, after_calls: bool) -> None:
        text = self._spaces + text
        if after_calls and not self._has_content:
            text = text.lstrip(SPACES)
        shown = text.rstrip(SPACES)
        self._content.append(shown)
        self._spaces = text[len(shown) :]
        if shown:
            self._has_content = True
            self._spaces_before_call = None

    def release_spaces(self) -> None:
        self._content.append(self._spaces)
        self._spaces = ""

    def begin_call(self, index: int, name: str) -> None:
        if self._spaces_before_call is not None:
            self._spaces = self._spaces_before_call  # those between two calls only set them apart
        self._spaces_before_call = self._spaces
        self._deltas.append(ToolCallDelta(index, id=new_call_id(), name=name))

    def add_arguments(self, index: int, arguments: str) -> None:
        self._deltas.append(ToolCallDelta(index, arguments=arguments))

    def taken(self) -> ToolPiece:
        piece = ToolPiece("".join(self._content), tuple(self._deltas))
        self._content, self._deltas = [], []
        return piece


def gathered(pieces: Iterable[ToolPiece]) -> tuple[str, list[ToolCall]]:
    """The content and the calls that pieces add up to."""
    content, calls = "", list[ToolCall]()
    for piece in pieces:
        content += piece.content
        for delta in piece.calls:
            if delta.id is not None:
                calls.append(ToolCall(delta.id, delta.name or "", ""))
            last = calls[delta.index]
            calls[delta.index] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
    return content, calls


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def tool_parser(
    name: str, tokenizer: PreTrainedTokenizerBase | None = None, names: Collection[str] | None = None
) -> ToolParser:
    """The parser of `--tool-parser`; "auto" looks at the model's chat template and tokens."""
    if name not in PARSERS:
        raise InputError(f"there is no tool parser '{name}'; {did_you_mean(name, PARSERS)}")
    style = style_of(tokenizer) if name == "auto" else name
    return ToolParser(SYNTAXES.get(style), names)


def style_of(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """How a model was taught to write calls. Where nothing tells, Hermes' way: it is the easiest to tell from text."""
    template = template_text(tokenizer)
    if tokenizer is None or "<tool_call>" in template:
        return "hermes"
    return "llama3" if PYTHON_TAG in template or PYTHON_TAG in tokenizer.get_vocab() else "hermes"


def template_text(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The chat template; where there are several, all of them."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)
