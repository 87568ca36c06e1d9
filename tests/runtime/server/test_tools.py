"""Tools of a request: wrong ones are refused, the model is told of them, and guided answers are calls of them."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import quantkit
from quantkit.errors import InputError
from quantkit.runtime.sampling.structured_output import Guide, GuideCompiler
from quantkit.runtime.server.tools.definitions import (
    MOST_PARALLEL_CALLS,
    ToolsError,
    check_tools,
    guide_for,
    template_knows_tools,
    tool_system_text,
    turns_with_tools,
)
from quantkit.runtime.server.tools.parsers import ToolCall, gathered, tool_parser
from quantkit.runtime.server.tools.syntaxes import SYNTAXES

pytest.importorskip("llguidance")

END = 0
MOST_TOKENS = 3_000
STYLES = sorted(SYNTAXES)


@cache
def demo() -> Any:
    return AutoTokenizer.from_pretrained(Path(quantkit.__file__).parent / "bundled" / "demo")


@cache
def compiler() -> GuideCompiler:
    return GuideCompiler(demo(), 4096, (END,))


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name, "description": f"does {name}"}
    return {"type": "function", "function": function if parameters is None else function | {"parameters": parameters}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def written(style: str, calls: list[tuple[str, str]]) -> str:
    return SYNTAXES[style].between.join(SYNTAXES[style].write(*call) for call in calls)


def without_ids(found: tuple[str, list[ToolCall]]) -> tuple[str, list[tuple[str, str]]]:
    return found[0], [(call.name, call.arguments) for call in found[1]]


def fake(template: Any, vocabulary: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(chat_template=template, get_vocab=lambda: dict.fromkeys(vocabulary, 0))


# Telling the model.


def test_templates_that_know_tools() -> None:
    assert not template_knows_tools(demo())
    assert template_knows_tools(fake("{% if tools %}"))
    assert template_knows_tools(fake({"default": "", "tool_use": "{{ tools }}"}))


@pytest.mark.parametrize("style", STYLES)
def test_what_a_model_is_told(style: str) -> None:
    tools = [tool("größe", {"type": "object", "properties": {"a": {"enum": ["{x}"]}}}), tool("g")]
    text = tool_system_text(tools, style)
    assert [json.loads(line) for line in text.splitlines() if line.startswith('{"type"')] == tools
    assert SYNTAXES[style].arguments_key in text


@pytest.mark.parametrize("style", STYLES)
def test_turns_become_text(style: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "It is 42."},
    ]
    told = turns_with_tools(turns, [tool("f")], style)
    assert [turn["role"] for turn in told] == ["system", "user", "assistant", "user", "assistant"]
    assert without_ids(tool_parser(style).parse(told[2]["content"])) == ("", [("f", '{"a": "é"}')] * 2)
    assert told[3]["content"] == "<tool_response>\n42\n</tool_response>"
    prompt = demo().apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    assert tool_system_text([tool("f")], style) in prompt
    assert "tool_calls" in turns[1], "the caller's turns do not change"


def test_a_system_text_of_the_request_comes_first() -> None:
    told = turns_with_tools([{"role": "system", "content": "Be kind."}], [tool("f")], "hermes")
    assert len(told) == 1
    assert told[0]["content"].startswith("Be kind.\n\n# Tools")


# What a request says.

OBJECT = {"type": "object", "properties": {}}
WRONG: list[tuple[Any, Any, str]] = [
    ({}, None, "tools"),
    ([tool("f")] * 129, None, "tools"),
    (["f"], None, "tools[0].type"),
    ([{"type": "retrieval"}], None, "tools[0].type"),
    ([tool("f"), {"type": "function"}], None, "tools[1].function"),
    ([tool("")], None, "tools[0].function.name"),
    ([tool("a b")], None, "tools[0].function.name"),
    ([tool("a\n")], None, "tools[0].function.name"),
    ([tool("a" * 65)], None, "tools[0].function.name"),
    ([named(3)], None, "tools[0].function.name"),  # type: ignore[arg-type]
    ([tool("f"), tool("g"), tool("f")], None, "tools[2].function.name"),
    ([{"type": "function", "function": {"name": "f", "description": 3}}], None, "tools[0].function.description"),
    ([tool("f", [])], None, "tools[0].function.parameters"),
    ([tool("f", "object")], None, "tools[0].function.parameters"),
    ([tool("f", {"type": "string"})], None, "tools[0].function.parameters.type"),
    ([tool("f")], "always", "tool_choice"),
    ([tool("f")], 3, "tool_choice"),
    ([tool("f")], {"type": "allowed_tools"}, "tool_choice"),
    ([tool("f")], named("g"), "tool_choice.function.name"),
    ([tool("f")], {"type": "function"}, "tool_choice.function.name"),
    ([tool("f")], {"type": "function", "function": {"name": ["f"]}}, "tool_choice.function.name"),
    (None, "required", "tool_choice"),
    ([], named("f"), "tool_choice"),
]


@pytest.mark.parametrize(("tools", "choice", "param"), WRONG)
def test_wrong_requests(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(ToolsError) as raised:
        check_tools(tools, choice)
    assert raised.value.param == param
    assert str(raised.value).startswith(f"{param} ")
    assert isinstance(raised.value, InputError)


@pytest.mark.parametrize("choice", [None, "none", "auto", "required", named("f"), named("a-B_9" * 12)])
def test_right_requests(choice: Any) -> None:
    check_tools([tool("f", OBJECT), tool("a-B_9" * 12), tool("g", {})], choice)
    check_tools(None, choice if choice in (None, "none", "auto") else None)


# Making it call.

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"enum": ["celsius", "fahrenheit", '"}}</tool_call>']},
    },
    "required": ["city", "unit"],
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
TOOLS = [
    tool("weather", WEATHER),
    tool("now"),
    tool("plot", {"properties": {"points": {"type": "array", "items": {"type": "number"}, "maxItems": 3}}}),
    tool("either", {"anyOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}]}),
]


def answer(guide: Guide, seed: int, free: int = 60) -> str:
    """Random allowed tokens, and after `free` of them an end as soon as one is allowed."""
    pick, tokens = random.Random(seed), list[int]()
    for _ in range(MOST_TOKENS):
        allowed = guide.mask().nonzero().flatten().tolist()
        if guide.finished or (END in allowed and len(tokens) >= free):
            return str(demo().decode(tokens))
        texts = [token for token in allowed if token != END]
        closing = [token for token in texts if set(demo().decode([token])) <= set('"}]')] if len(tokens) >= free else []
        tokens.append(pick.choice(closing or texts))
        guide.advance(tokens[-1])
    raise AssertionError("no end")


@given(
    st.sampled_from(STYLES),
    st.sampled_from(["required", named("weather"), named("now")]),
    st.booleans(),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=80)
def test_guided_answers_are_valid_calls(style: str, choice: Any, parallel: bool, seed: int) -> None:
    spec = guide_for(TOOLS, choice, parallel, style)
    assert spec is not None
    text = answer(compiler().compile(spec), seed)
    schemas = {one["function"]["name"]: one["function"].get("parameters", {"maxProperties": 0}) for one in TOOLS}
    content, calls = tool_parser(style, names=schemas).parse(text)
    assert content == ""
    assert 1 <= len(calls) <= (MOST_PARALLEL_CALLS if parallel and choice == "required" else 1)
    for call in calls:
        jsonschema.Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments))
        assert choice == "required" or call.name == choice["function"]["name"]
    stream = tool_parser(style).stream(eager=True)
    eager = gathered([*map(stream.push, text), stream.finish()])
    assert without_ids(eager) == without_ids((content, calls))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("parallel", [True, False])
def test_every_tool_can_be_called_and_several_only_in_parallel(style: str, parallel: bool) -> None:
    calls = [("weather", '{"city": "Köln", "unit": "celsius"}'), ("now", "{}"), ("either", '{"a": 1}')]
    spec = guide_for(TOOLS, "required", parallel, style)
    assert spec is not None
    for call in calls:
        guide = compiler().compile(spec)
        for token in demo().encode(written(style, [call])):
            guide.advance(token)
        assert guide.mask()[END]
        assert guide.finished == (not parallel)
    guide = compiler().compile(spec)
    if parallel:
        for token in demo().encode(written(style, calls)):
            guide.advance(token)
        assert guide.mask()[END]


def test_no_guide_where_the_model_is_free() -> None:
    for choice in (None, "none", "auto"):
        assert guide_for(TOOLS, choice, True, "hermes") is None


def test_guides_that_cannot_be() -> None:
    with pytest.raises(ToolsError, match=r"tool_choice asks for a call, but .* without a tool parser"):
        guide_for(TOOLS, "required", True, "none")
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(ToolsError, match="uniqueItems") as raised:
        guide_for([tool("f"), tool("g", schema)], "required", True, "hermes")
    assert raised.value.param == "tools[1].function.parameters"
    assert guide_for([tool("f"), tool("g", schema)], named("f"), True, "hermes") is not None
