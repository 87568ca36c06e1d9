"""Structured output: whatever tokens are picked among the allowed ones, the text is what was asked for."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import quantkit
from quantkit.runtime.sampling.structured_output import Guide, GuideBroken, GuideCompiler, GuideSpec

pytest.importorskip("llguidance")

VOCAB = 4100  # the demo's tokenizer has 4,096 tokens; a model's logits are often padded
END, OTHER_END = 0, 4
MOST_TOKENS = 3_000
CLOSING = '"}]'  # what brings JSON to an end
SEEDS = st.integers(0, 2**32)


@cache
def demo() -> Any:
    return AutoTokenizer.from_pretrained(Path(quantkit.__file__).parent / "bundled" / "demo")


@cache
def compiler() -> GuideCompiler:
    return GuideCompiler(demo(), VOCAB, (END, OTHER_END))


@cache
def closing_tokens() -> frozenset[int]:
    return frozenset(token for token in range(len(demo())) if set(demo().decode([token])) <= set(CLOSING))


def guide_of(kind: Any, text: Any = "") -> Guide:
    return compiler().compile(GuideSpec(kind, text if isinstance(text, str) else json.dumps(text)))


def allowed(guide: Guide) -> list[int]:
    tokens: list[int] = guide.mask().nonzero().flatten().tolist()
    assert tokens
    assert max(tokens) < len(demo())
    return tokens


def written(guide: Guide, seed: int, *, free: int = 40) -> str:
    """A random text: `free` tokens picked evenly among the allowed ones, then those that end soon."""
    pick = random.Random(seed)
    tokens: list[int] = []
    for _ in range(MOST_TOKENS):
        choices = allowed(guide)
        may_end = END in choices
        assert may_end == (OTHER_END in choices)
        assert guide.finished == (set(choices) == {END, OTHER_END})
        if guide.finished or (may_end and len(tokens) >= free):
            return str(demo().decode(tokens))
        texts = [token for token in choices if token not in (END, OTHER_END)]
        hurried = [token for token in texts if token in closing_tokens()] if len(tokens) >= free else []
        tokens.append(pick.choice(hurried or texts))
        guide.advance(tokens[-1])
    raise AssertionError(f"no end after {MOST_TOKENS} tokens: {demo().decode(tokens)[:500]!r}")


def take(guide: Guide, text: str) -> None:
    for token in demo().encode(text):
        guide.advance(token)


def may_write(guide: Guide, text: str) -> bool:
    try:
        take(guide, text)
    except GuideBroken:
        return False
    return END in allowed(guide)


# Schemas. Each draws only what can be satisfied; keys are few, so that names meet.

KEYS = st.sampled_from(["a", "b", "name", "größe", 'quo"te', "with space", ""])
PATTERNS = st.sampled_from(["^[a-z]{2,5}$", r"^\d{3}-\d{4}$", "^(red|green|blue)$", "^[A-Z][a-z]*$", "^a+b?c*$", "^x"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-1000, 1000), st.text(max_size=5), st.just(0.5))


def between(low: str, high: str, numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """None, one or both ends of a range, in order."""
    both = st.lists(numbers, min_size=2, max_size=2, unique=True).map(sorted)
    return st.one_of(
        st.just({}),
        numbers.map(lambda value: {low: value}),
        numbers.map(lambda value: {high: value}),
        both.map(lambda pair: {low: pair[0], high: pair[1]}),
    )


def typed(name: str, *parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(
        lambda found: {"type": name} | {key: value for part in found for key, value in part.items()}
    )


QUARTERS = st.integers(-400, 400).map(lambda value: value / 4)
LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": "number"}]),
    typed("integer", between("minimum", "maximum", st.integers(-5000, 5000))),
    typed("integer", st.just({"minimum": 0, "maximum": 100}), st.integers(1, 9).map(lambda step: {"multipleOf": step})),
    typed("number", between("minimum", "maximum", QUARTERS)),
    # llguidance 1.9 takes 0 for a number between an excluded 0 and a bound nearer than 1.
    typed("number", between("exclusiveMinimum", "exclusiveMaximum", QUARTERS.filter(bool))),
    typed("string", between("minLength", "maxLength", st.integers(0, 12))),
    typed("string", PATTERNS.map(lambda pattern: {"pattern": pattern})),
    typed("string", st.sampled_from(["date", "time", "ipv4", "uuid"]).map(lambda name: {"format": name})),
    st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2), max_leaves=4
    ).map(lambda value: {"const": value}),
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(KEYS, inner, max_size=4))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = [key for key in properties if draw(st.booleans())]
    additional = draw(st.one_of(st.none(), st.just(False), inner))
    return schema if additional is None else schema | {"additionalProperties": additional}


def arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return typed("array", inner.map(lambda items: {"items": items}), between("minItems", "maxItems", st.integers(0, 4)))


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
    ),
    max_leaves=8,
)


@given(SCHEMAS, SEEDS)
@settings(deadline=None, max_examples=100)
def test_any_allowed_text_fits_the_schema(schema: dict[str, Any], seed: int) -> None:
    text = written(guide_of("json_schema", schema), seed)
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@given(SEEDS)
@settings(deadline=None, max_examples=30)
def test_json_object_is_any_object(seed: int) -> None:
    assert isinstance(json.loads(written(guide_of("json_object"), seed)), dict)


@pytest.mark.parametrize(
    "text", ['{"a": [1, {"b": null}], "c": "\\n é"}', "{}", '{\n  "a": 1,\n  "b": {\n    "c": 2\n  }\n}']
)
def test_json_object_allows_usual_spellings(text: str) -> None:
    assert may_write(guide_of("json_object"), text)


@pytest.mark.parametrize("text", ["[]", "1", '{"a": 1}\n', '{"a":  1}', '{\n\n"a": 1}', '{"a": 1,}', " {}", "{'a': 1}"])
def test_json_object_allows_neither_else_nor_much_whitespace(text: str) -> None:
    assert not may_write(guide_of("json_object"), text)


def test_schema_cannot_ask_for_endless_whitespace() -> None:
    guide = guide_of("json_schema", {"type": "object", "x-guidance": {"whitespace_pattern": "[ ]+"}})
    assert not may_write(guide, "{     }")


REGEXES = [
    r"[0-9]{3}-[a-f]+", r"(yes|no|maybe)!?", r"^\w{1,9}@\w{1,9}\.com$", r"[\w-]{4}\D\W",
    r"a/b\\c", r"[^a-z\n]{1,5}", r"(ab|a)(c|bcd)(d*)",
    r"(?i)hello", "Größe: \\d+ µm", r"\s?x\s?", "a\nb", "", r"(a|b)*abb", r".{3}", "🙂{2,3}", r"\"quoted\"", r"x*?y",
]  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_any_allowed_text_matches_the_regex(regex: str) -> None:
    for seed in range(5):
        text = written(guide_of("regex", regex), seed, free=10)
        assert re.fullmatch(regex, text, re.ASCII), text


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=5), SEEDS)
@settings(deadline=None, max_examples=60)
def test_choice_gives_one_of_the_texts(choices: list[str], seed: int) -> None:
    assert written(guide_of("choice", choices), seed, free=0) in choices
    for choice in choices:
        assert may_write(guide_of("choice", choices), choice)


def test_choice_may_begin_another() -> None:
    guide = guide_of("choice", ["a", "ab"])
    take(guide, "a")
    assert END in allowed(guide)
    assert not guide.finished
    take(guide, "b")
    assert guide.finished


ARITHMETIC = """
start: sum
sum: product ("+" product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
"""


@given(SEEDS)
@settings(deadline=None, max_examples=30)
def test_lark_grammar(seed: int) -> None:
    pick = random.Random(seed)
    guide, tokens = guide_of("grammar", ARITHMETIC), list[int]()
    for _ in range(MOST_TOKENS):
        choices = allowed(guide)
        if END in choices and len(tokens) > 20:
            break
        texts = [token for token in choices if token not in (END, OTHER_END)]
        closing = [token for token in texts if demo().decode([token]).strip(")") == ""] if len(tokens) > 20 else []
        tokens.append(pick.choice(closing or texts))
        guide.advance(tokens[-1])
    assert isinstance(eval(demo().decode(tokens), {"__builtins__": {}}), int)
