"""How models write tool calls, each as a coroutine that is sent the text one character after another.

    hermes   <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>           (Hermes, Qwen)
    llama3   {"name": "f", "parameters": {...}}; {...}    after <|python_tag|> or as the beginning of an answer,
             <function=f>{...}</function>                 anywhere

A coroutine returns at the last character of a call and raises NoMatch at the first that cannot belong to one. So text
that only looks like a call is known to be text as soon as it differs, in whatever pieces it comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Position = Literal["start", "after call", "in text"]
Steps = Generator[None, str, None]
StepsToNext = Generator[None, str, str]  # these return the character after what they matched

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
DEEPEST = 64  # levels of JSON in a call
SPACES = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ARGUMENT_KEYS = ("arguments", "parameters")
PYTHON_TAG = "<|python_tag|>"


class NoMatch(Exception):
    """What was sent is no call."""


class WrittenCall(NamedTuple):
    """A call as the model wrote it; `arguments` is the very text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Syntax:
    """One way of writing calls."""

    name: str
    match: Callable[[Position], Steps]
    start: Callable[[str, int, Position], int]  # where in a text, from an index on, a call may begin, or -1
    head: re.Pattern[str]  # a call up to its arguments, the name in group 1 or 2
    tags: tuple[str, str]  # what encloses a call
    between: str  # calls
    arguments_key: str

    def write(self, name: str, arguments: str) -> str:
        """A call as `match` knows it."""
        before, after = self.around_arguments(name)
        return before + arguments + after

    def around_arguments(self, name: str) -> tuple[str, str]:
        """The text of a call before and after its arguments."""
        return f'{self.tags[0]}{{"name": "{name}", "{self.arguments_key}": ', f"}}{self.tags[1]}"

    def read(self, text: str) -> WrittenCall | None:
        """The call in a text that `match` accepted, or None: JSON that calls nothing."""
        function = re.match(r"\s*;?\s*<function=([^>]*)>", text)
        if function:
            return WrittenCall(function[1], text[text.index("{") : text.rindex("}") + 1])
        try:
            members = _members(text[text.index("{") : text.rindex("}") + 1])
        except ValueError:  # such as a number of 5,000 digits
            return None
        name, _ = members.get("name", (None, ""))
        given = [members[key] for key in _ARGUMENT_KEYS if key in members]
        if (
            not isinstance(name, str)
            or not NAME.fullmatch(name)
            or len(given) != 1
            or not isinstance(given[0][0], dict)
        ):
            return None
        return WrittenCall(name, given[0][1])

    def begun_call(self, text: str) -> tuple[str | None, str]:
        """The name of a call that is being written, if it is known, and its arguments as far as they are there."""
        head = self.head.match(text)
        if not head:
            return None, ""
        name: str = head[1] or head[2]
        return name, text[head.end() : _object_end(text, head.end())]


def _object_end(text: str, start: int) -> int:
    """Where the JSON object that begins at `start` ends, or the text."""
    depth = 0
    for token in re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}]', re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return len(text)


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """The values of a JSON object, each also as it is written."""
    decoder, found, position = json.JSONDecoder(), {}, 1
    while (position := _after(r"[\s,]*", text, position)) < len(text) - 1:
        key, position = decoder.raw_decode(text, position)
        position = _after(r"\s*:\s*", text, position)
        value, end = decoder.raw_decode(text, position)
        found[key] = (value, text[position:end])
        position = end
    return found


def _after(pattern: str, text: str, position: int) -> int:
    found = re.compile(pattern).match(text, position)
    return found.end() if found else position


# Calls.


def _hermes(_: Position) -> Steps:
    yield from _literal("<tool_call>")
    yield from _object((yield from _skip_spaces((yield))))
    yield from _literal("</tool_call>", (yield from _skip_spaces((yield))))


def _hermes_start(text: str, index: int, _: Position) -> int:
    return text.find("<", index)


def _llama3(position: Position) -> Steps:
    char = yield
    if position != "in text":
        char = yield from _skip_spaces(char)
    if position == "after call" and char == ";":
        char = yield from _skip_spaces((yield))
    if position != "in text" and char == "{":
        return (yield from _object(char))
    yield from _literal("<", char)
    char = yield
    if char == "|":
        yield from _literal(PYTHON_TAG[2:])
        return (yield from _object((yield from _skip_spaces((yield)))))
    yield from _literal("function=", char)
    yield from _name_up_to(">")
    yield from _object((yield from _skip_spaces((yield))))
    return (yield from _literal("</function>", (yield from _skip_spaces((yield)))))


def _llama3_start(text: str, index: int, position: Position) -> int:
    return text.find("<", index) if position == "in text" else index


def _name_up_to(end: str) -> Steps:
    name = ""
    while (char := (yield)) != end:
        name += char
        if not NAME.fullmatch(name):
            raise NoMatch
    if not name:
        raise NoMatch


# JSON.


def _literal(text: str, first: str | None = None) -> Steps:
    for expected in text:
        char = (yield) if first is None else first
        first = None
        if char != expected:
            raise NoMatch


def _skip_spaces(char: str) -> StepsToNext:
    while char in SPACES:
        char = yield
    return char


def _object(char: str, depth: int = 0) -> Steps:
    yield from _literal("{", char)
    yield from _items("}", depth)


def _items(closing: str, depth: int) -> Steps:
    """Up to the end of an object or an array that was opened."""
    if depth > DEEPEST:
        raise NoMatch
    char = yield from _skip_spaces((yield))
    if char == closing:
        return
    while True:
        if closing == "}":
            yield from _string(char)
            yield from _literal(":", (yield from _skip_spaces((yield))))
            char = yield from _skip_spaces((yield))
        char = yield from _skip_spaces((yield from _value(char, depth + 1)))
        if char == closing:
            return
        yield from _literal(",", char)
        char = yield from _skip_spaces((yield))


def _value(char: str, depth: int) -> StepsToNext:
    if char in "{[":
        yield from _items("}" if char == "{" else "]", depth)
    elif char == '"':
        yield from _string(char)
    elif char in "tfn":
        yield from _literal({"t": "true", "f": "false", "n": "null"}[char], char)
    else:
        return (yield from _number(char))
    return (yield)


def _string(char: str) -> Steps:
    yield from _literal('"', char)
    while (char := (yield)) != '"':
        if char < " ":
            raise NoMatch
        if char == "\\":
            yield from _escape()


def _escape() -> Steps:
    char = yield
    if char not in '"\\/bfnrtu':
        raise NoMatch
    for _ in range(4 if char == "u" else 0):
        if (yield) not in "0123456789abcdefABCDEF":
            raise NoMatch


def _number(char: str) -> StepsToNext:
    text = ""
    while char in "+-.eE0123456789":
        text += char
        char = yield
    if not _NUMBER.fullmatch(text):
        raise NoMatch
    return char


_HEAD = r'\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
HERMES = Syntax(
    name="hermes",
    match=_hermes,
    start=_hermes_start,
    head=re.compile(rf"<tool_call>\s*{_HEAD}"),
    tags=("<tool_call>\n", "\n</tool_call>"),
    between="\n",
    arguments_key="arguments",
)
LLAMA3 = Syntax(
    name="llama3",
    match=_llama3,
    start=_llama3_start,
    head=re.compile(
        rf"\s*;?\s*(?:(?:{re.escape(PYTHON_TAG)})?\s*{_HEAD}|<function=([a-zA-Z0-9_-]{{1,64}})>\s*(?=\{{))"
    ),
    tags=("", ""),
    between="; ",
    arguments_key="parameters",
)
SYNTAXES = {syntax.name: syntax for syntax in (HERMES, LLAMA3)}
