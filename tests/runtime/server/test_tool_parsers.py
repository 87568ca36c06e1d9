"""Tool calls in text: what is written is read back, however it is cut, and what is no call stays text."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import quantkit
from quantkit.errors import InputError
from quantkit.runtime.server.tools.parsers import ToolCall, ToolPiece, ToolStream, gathered, style_of, tool_parser
from quantkit.runtime.server.tools.syntaxes import DEEPEST, SYNTAXES

STYLES = sorted(SYNTAXES)
STYLE = st.sampled_from(STYLES)
NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
# Strings that look like what encloses calls, quotes and escapes among them.
HARD = [
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "</function>",
    "<|python_tag|>",
    '"',
    "\\",
    "{",
    "}",
    ";",
    "\n",
    "é🙂",
]
STRINGS = st.lists(st.sampled_from(HARD) | st.text(max_size=3), max_size=4).map("".join)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3), max_leaves=6
)
ARGUMENTS = st.builds(
    lambda value, indent, ascii_only: json.dumps(value, indent=indent, ensure_ascii=ascii_only),
    st.dictionaries(STRINGS, VALUES, max_size=3),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
# Texts of pieces that calls are made of, so that many are nearly calls.
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": [1]}}',
    '{"name": "f", ', '"arguments": {"x": "', '"}}', "<function=f>", "</function>", "<|python_tag|>", "{}", "; ", "\n",
    " ", "<", "text", '{"name": "f"}', "{", "}", '"', '<tool_call>\n{"name": "g", "arguments": {"b": 1}}\n</tool_call>',
]  # fmt: skip
MESSES = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)
quickly = settings(deadline=None, max_examples=60)


@cache
def demo() -> Any:
    return AutoTokenizer.from_pretrained(Path(quantkit.__file__).parent / "bundled" / "demo")


def written(style: str, calls: list[tuple[str, str]]) -> str:
    return SYNTAXES[style].between.join(SYNTAXES[style].write(*call) for call in calls)


def without_ids(found: tuple[str, list[ToolCall]]) -> tuple[str, list[tuple[str, str]]]:
    return found[0], [(call.name, call.arguments) for call in found[1]]


def read(style: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    return without_ids(tool_parser(style).parse(text))


def streamed(stream: ToolStream, pieces: list[str]) -> list[ToolPiece]:
    return [*(stream.push(piece) for piece in pieces), stream.finish()]


def read_in_pieces(style: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    return without_ids(gathered(streamed(tool_parser(style).stream(), pieces)))


# Round trips.


@given(STYLE, CALLS)
@quickly
def test_calls_are_read_back(style: str, calls: list[tuple[str, str]]) -> None:
    text = written(style, calls)
    assert read(style, text) == ("", calls)
    assert read_in_pieces(style, list(text)) == ("", calls)


TEXTS = MESSES | CALLS.map(lambda calls: f"So: {written('hermes', calls)} and so on\n")


@given(STYLE, TEXTS)
@settings(deadline=None, max_examples=40)
def test_it_does_not_matter_where_the_text_is_cut(style: str, text: str) -> None:
    assert_same_wherever_cut(style, text)


@pytest.mark.long
@given(STYLE, TEXTS)
@settings(deadline=None, max_examples=300)
def test_it_does_not_matter_where_many_texts_are_cut(style: str, text: str) -> None:
    assert_same_wherever_cut(style, text)


def assert_same_wherever_cut(style: str, text: str) -> None:
    whole = read(style, text)
    assert read_in_pieces(style, list(text)) == whole
    for cut in range(len(text) + 1):
        assert read_in_pieces(style, [text[:cut], text[cut:]]) == whole


@given(STYLE, MESSES)
@quickly
def test_nothing_is_lost(style: str, text: str) -> None:
    content, calls = read(style, text)
    if not calls:
        assert content == text
    rest = iter("".join(text.split()))
    assert all(char in rest for char in "".join(content.split()))  # in this order
    for _, arguments in calls:
        assert arguments in text


@given(CALLS)
@quickly
def test_hermes_keeps_the_text_around_calls(calls: list[tuple[str, str]]) -> None:
    text = f"I will.\n{written('hermes', calls)}\n  Done.\n"  # whitespace between calls and at the end is no content
    assert read("hermes", text) == ("I will.\n\n  Done.", calls)


@given(st.text() | MESSES)
@quickly
def test_without_a_parser_all_is_content(text: str) -> None:
    assert read("none", text) == (text, [])
    assert tool_parser("none").stream().push(text) == ToolPiece(text)


LLAMA3 = [
    '{"name": "f", "parameters": {"a": 1}}',
    '\n <|python_tag|>{"name": "f", "parameters": {"a": 1}}',
    '<function=f>{"a": 1}</function>',
    '<function=f> {"a": 1} </function>\n',
    '{"type": "function", "name": "f", "parameters": {"a": 1}}',
    '{"parameters": {"a": 1}, "name": "f"}',
    '{"name": "f", "arguments": {"a": 1}}',
]


@pytest.mark.parametrize("first", LLAMA3)
@pytest.mark.parametrize("second", LLAMA3)
@pytest.mark.parametrize("between", [";", "; ", " ;\n", "\n", ""])
def test_llama3_spellings(first: str, second: str, between: str) -> None:
    call = ("f", '{"a": 1}')
    assert read("llama3", first) == ("", [call])
    assert read("llama3", first + between + second) == ("", [call, call])


def test_llama3_functions_amid_text() -> None:
    text = 'Let me see. <function=f>{"a": 1}</function> Or <|python_tag|>{"name": "g", "parameters": {}}; {"x": 1}'
    assert read("llama3", text) == ('Let me see.  Or ; {"x": 1}', [("f", '{"a": 1}'), ("g", "{}")])


NO_HERMES_CALLS = [
    '<tool_call>{"name": "f", "arguments": {}}',  # not closed
    '<tool_call>{"name": "f", "arguments": {}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {},}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "f"}</tool_call>',
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f g", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>',
    "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * DEEPEST + "]" * DEEPEST + "}}</tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>[]</tool_call>",
    "<tool_call",
    '{"name": "f", "arguments": {}}',
]  # fmt: skip
NO_LLAMA3_CALLS = [
    'Call {"name": "f", "parameters": {}}',  # amid text
    '; {"name": "f", "parameters": {}}',
    '{"name": "f", "parameters": {}',
    '{"name": "f", "description": "a person"}',
    '<function=>{"a": 1}</function>',
    '<function=f g>{"a": 1}</function>',
    "<function=f>1</function>",
    '<function=f>{"a": 1}',
    "<|python_tag|>print(1)",
    "<tool_call>",
]


@pytest.mark.parametrize(
    ("style", "text"),
    [("hermes", text) for text in NO_HERMES_CALLS] + [("llama3", text) for text in NO_LLAMA3_CALLS],
    ids=lambda value: value[:70],
)
def test_what_is_no_call_stays_text(style: str, text: str) -> None:
    assert read(style, text) == (text, [])
    assert read_in_pieces(style, list(f" {text} \n")) == (f" {text} \n", [])


def test_a_call_after_what_looked_like_one() -> None:
    text = '<tool_call>{"name": <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read("hermes", text) == ('<tool_call>{"name":', [("f", "{}")])


def test_only_known_names_are_calls() -> None:
    text = written("hermes", [("f", "{}"), ("g", "{}")])
    content, calls = tool_parser("hermes", names={"g"}).parse(text)
    assert [call.name for call in calls] == ["g"]
    assert content == SYNTAXES["hermes"].write("f", "{}")


def test_many_angle_brackets_take_no_time() -> None:
    text = "<" * 50_000
    assert read("hermes", text) == (text, [])


# Streams.


def test_content_comes_as_early_as_it_is_safe() -> None:
    stream = tool_parser("hermes").stream()
    assert stream.push("a < b").content == "a < b"
    assert stream.push(" <").content == ""
    assert stream.push("tool").content == ""
    assert stream.push("s>").content == " <tools>"
    assert stream.push("<tool_call>{").content == ""
    assert stream.push("x").content == "<tool_call>{x"
    assert stream.calls_made == 0


def test_llama3_json_that_is_no_call_comes_when_that_is_known() -> None:
    stream = tool_parser("llama3").stream()
    assert stream.push('{"a": 1').content == ""
    assert stream.push("} is it").content == '{"a": 1} is it'
    assert stream.push(' {"name"').content == ' {"name"'


@given(STYLE, CALLS, st.integers(1, 7), st.booleans())
@quickly
def test_deltas_have_the_shape_of_openai(style: str, calls: list[tuple[str, str]], size: int, eager: bool) -> None:
    text = written(style, calls)
    stream = tool_parser(style).stream(eager=eager)
    pieces = streamed(stream, [text[start : start + size] for start in range(0, len(text), size)])
    deltas = [delta.as_json() for piece in pieces for delta in piece.calls]
    assert stream.calls_made == len(calls)
    for index, (name, arguments) in enumerate(calls):
        own = [delta for delta in deltas if delta["index"] == index]
        assert own[0]["type"] == "function"
        assert own[0]["id"].startswith("call_")
        assert own[0]["function"] == {"name": name, "arguments": ""}
        assert all(set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"} for delta in own[1:])
        assert "".join(delta["function"]["arguments"] for delta in own) == arguments
    assert len({delta["id"] for delta in deltas if "id" in delta}) == len(calls)
    assert [delta["index"] for delta in deltas] == sorted(delta["index"] for delta in deltas)


@given(STYLE, NAMES, ARGUMENTS)
@quickly
def test_eager_streams_send_every_character_at_once(style: str, name: str, arguments: str) -> None:
    before, after = SYNTAXES[style].around_arguments(name)
    stream = tool_parser(style).stream(eager=True)
    assert stream.push(before) == ToolPiece()
    for char in arguments:
        assert "".join(delta.arguments for delta in stream.push(char).calls) == char
    assert [stream.push(after), stream.finish()] == [ToolPiece(), ToolPiece()]


def test_an_eager_call_that_is_cut_off_keeps_what_was_sent() -> None:
    pieces = streamed(
        tool_parser("hermes").stream(eager=True), ['<tool_call>\n{"name": "f", "arguments": {"a": ', "[1, "]
    )
    assert without_ids(gathered(pieces)) == ("", [("f", '{"a": [1, ')])


# Which parser.


def fake(template: Any, vocabulary: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(chat_template=template, get_vocab=lambda: dict.fromkeys(vocabulary, 0))


def test_auto_looks_at_template_and_tokens() -> None:
    assert style_of(demo()) == "hermes"
    assert style_of(fake("... <tool_call> ...", ("<|python_tag|>",))) == "hermes"
    assert style_of(fake("{{ messages }}", ("<|python_tag|>",))) == "llama3"
    assert style_of(fake("... <|python_tag|> ...")) == "llama3"
    assert style_of(fake(None)) == "hermes"
    assert style_of(None) == "hermes"
    assert style_of(fake({"default": "", "tool_use": "<tool_call> {{ tools }}"})) == "hermes"
    parser = tool_parser("auto", fake("", ("<|python_tag|>",)))
    assert parser.syntax is SYNTAXES["llama3"]
    assert tool_parser("none").syntax is None
    with pytest.raises(InputError, match="did you mean 'hermes'"):
        tool_parser("herms")
