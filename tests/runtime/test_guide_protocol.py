"""Guides as the engine uses them: masks, tokens one after another, what is kept; and every spec that is wrong."""

from __future__ import annotations

import json
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import quantkit
from quantkit.errors import InputError
from quantkit.runtime.sampling.structured_output import (
    KEPT_GRAMMARS,
    Guide,
    GuideBroken,
    GuideCompiler,
    GuideSpec,
    check_guide,
)

pytest.importorskip("llguidance")

VOCAB = 4100  # the demo's tokenizer has 4,096 tokens; a model's logits are often padded
END, OTHER_END = 0, 4


@cache
def demo() -> Any:
    return AutoTokenizer.from_pretrained(Path(quantkit.__file__).parent / "bundled" / "demo")


@cache
def compiler() -> GuideCompiler:
    return GuideCompiler(demo(), VOCAB, (END, OTHER_END))


def guide_of(kind: Any, text: Any = "") -> Guide:
    return compiler().compile(GuideSpec(kind, text if isinstance(text, str) else json.dumps(text)))


def allowed(guide: Guide) -> list[int]:
    tokens: list[int] = guide.mask().nonzero().flatten().tolist()
    assert tokens
    assert max(tokens) < len(demo())
    return tokens


def take(guide: Guide, text: str) -> None:
    for token in demo().encode(text):
        guide.advance(token)


def may_write(guide: Guide, text: str) -> bool:
    try:
        take(guide, text)
    except GuideBroken:
        return False
    return END in allowed(guide)


def test_masks_cover_the_models_vocabulary() -> None:
    for vocab in (4096, 4095, 4097, 5000, 3000):
        guide = GuideCompiler(demo(), vocab, (END,)).compile(GuideSpec("regex", "(.|\n)*"))
        mask, words = guide.mask(), guide.bitmask()
        assert mask.shape == (vocab,)
        assert words.shape == ((vocab + 31) // 32,)
        assert not mask[len(demo()) :].any()
        bits = [int(words[index // 32]) >> (index % 32) & 1 for index in range(len(words) * 32)]
        assert bits[:vocab] == mask.int().tolist()
        assert not any(bits[vocab:])


def test_special_tokens_are_no_text() -> None:
    special = set(demo().all_special_ids) - {END, OTHER_END}
    assert special.isdisjoint(allowed(guide_of("regex", "(.|\n)*")))


def test_guides_of_one_spec_are_independent() -> None:
    first, second = (guide_of("regex", "abc") for _ in range(2))
    take(first, "ab")
    assert may_write(second, "abc")
    assert may_write(first, "c")


def test_a_broken_guide_does_not_break_others() -> None:
    guide, other = (guide_of("regex", "abc") for _ in range(2))
    with pytest.raises(GuideBroken, match=r"'x'.*does not fit"):
        take(guide, "x")
    with pytest.raises(GuideBroken):
        guide.mask()
    assert not guide.finished
    assert may_write(other, "abc")
    assert may_write(guide_of("regex", "abc"), "abc")


@pytest.mark.parametrize("token", [END, 1, 4099, VOCAB, -1, 10**9])
def test_forbidden_tokens(token: int) -> None:
    with pytest.raises(GuideBroken, match=f"token {token} "):
        guide_of("regex", "abc").advance(token)


def test_after_the_end_only_end_tokens_follow() -> None:
    guide = guide_of("regex", "a*")
    guide.advance(END)
    assert guide.finished
    assert set(allowed(guide)) == {END, OTHER_END}


def test_equal_specs_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own, compiled = GuideCompiler(demo(), VOCAB, (END,)), []
    original = GuideCompiler._grammar
    monkeypatch.setattr(GuideCompiler, "_grammar", lambda self, spec: compiled.append(spec) or original(self, spec))
    for _ in range(3):
        own.compile(GuideSpec("regex", "once"))
    assert len(compiled) == 1
    for number in range(KEPT_GRAMMARS):
        own.compile(GuideSpec("regex", f"{number}"))
    own.compile(GuideSpec("regex", "once"))
    assert len(compiled) == KEPT_GRAMMARS + 2


def test_a_grammar_that_ran_out_of_states_is_compiled_anew() -> None:
    spec = GuideSpec("regex", "(a|b)*a(a|b){20}c")  # a state for each of the last 20 letters' 2**20 combinations
    pick = random.Random(0)
    letters = [demo().convert_tokens_to_ids(letter) for letter in "ab"]

    def run_out() -> None:
        guide = compiler().compile(spec)
        for _ in range(200_000):
            guide.advance(pick.choice(letters))

    with pytest.raises(GuideBroken, match="too many"):
        run_out()
    take(compiler().compile(spec), "abab")


WRONG = [
    ("regex", "[", "regex.*unclosed character class"),
    ("regex", "(?=a)b", "regex.*look-around"),
    ("regex", r"(a)\1", "regex.*backreferences"),
    ("regex", "[a&&b]", "regex.*no text fits"),
    ("regex", "a\\", "regex"),
    ("regex", "\ud800", "regex.*surrogates"),
    ("json_schema", "{", "JSON schema is no JSON"),
    ("json_schema", "[" * 100_000, "JSON schema is no JSON"),
    ("json_schema", '{"not":' * 400 + "1" + "}" * 400, "JSON schema"),
    ("json_schema", "[]", "JSON schema.*must be an object"),
    ("json_schema", "false", "JSON schema"),
    ("json_schema", {"type": "strin"}, "JSON schema.*Invalid type: strin"),
    ("json_schema", {"enum": []}, "JSON schema.*empty"),
    ("json_schema", {"type": "integer", "minimum": 3, "maximum": 1}, "JSON schema.*minimum"),
    ("json_schema", {"type": "object", "properties": []}, "JSON schema.*properties"),
    ("json_schema", {"$ref": "#/nowhere"}, "JSON schema.*nowhere"),
    ("json_schema", {"$ref": "https://example.com/schema"}, "JSON schema.*example.com"),
    ("json_schema", {"not": {}}, "JSON schema.*not"),
    ("json_schema", {"type": "string", "pattern": "("}, "JSON schema.*unclosed group"),
    ("json_schema", {"type": "string", "format": "poem"}, "JSON schema.*poem"),
    ("choice", "a", "list of choices is no JSON"),
    ("choice", "[]", "list of choices"),
    ("choice", "[1]", "list of choices"),
    ("choice", '{"a": 1}', "list of choices"),
    ("choice", '["\\ud800"]', "list of choices.*surrogates"),
    ("grammar", "", "grammar.*[Ee]mpty"),
    ("grammar", "start: missing", "grammar.*missing"),
    ("grammar", 'other: "a"', "grammar.*no start rule"),
    ("grammar", "start: %%%", "grammar"),
    ("grammar", "start: <|nothing|>", "grammar.*nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "message"), WRONG)
def test_wrong_specs(kind: str, text: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        guide_of(kind, text)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("kind", "text", "message"), [case for case in WRONG if case[1] not in ("[a&&b]", "start: <|nothing|>")]
)
def test_check_finds_wrong_specs_without_a_tokenizer(kind: Any, text: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_guide(GuideSpec(kind, text if isinstance(text, str) else json.dumps(text)))


def test_check_passes_right_specs() -> None:
    for spec in (GuideSpec("json_object"), GuideSpec("regex", "a+"), GuideSpec("json_schema", "true")):
        check_guide(spec)
    check_guide(GuideSpec("grammar", "start: <|user|>"))


def test_wrong_kinds_and_types() -> None:
    with pytest.raises(InputError, match="did you mean 'json_schema'"):
        GuideSpec("json_scheme", "{}")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must be a text"):
        GuideSpec("json_schema", {})  # type: ignore[arg-type]


def test_end_tokens_must_exist() -> None:
    for eos in ((), (99_999,)):
        with pytest.raises(InputError, match="structured output is not possible"):
            GuideCompiler(demo(), VOCAB, eos)


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # Python's own way to say that there is none
    words = r"structured output needs llguidance; pip install 'quantkit\[serve\]'"
    with pytest.raises(InputError, match=words):
        GuideCompiler(demo(), VOCAB, (END,))
    with pytest.raises(InputError, match=words):
        check_guide(GuideSpec("json_object"))
