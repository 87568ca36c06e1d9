"""The requests whose answers are promised: greedy or with a seed, so each has one answer, whoever else is there."""

from dataclasses import dataclass
from typing import Any

MODEL = "demo"
PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
_STARTS = ("The function returns", "In the year", "A list of words", "import os\n\ndef")
_LONG = "The list holds words. Each word has a number, and each number has a name. " * 8
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_GRAMMAR = 'start: "yes " NUMBER | "no " NUMBER\nNUMBER: /[0-9]{1,4}/'


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: dict[str, Any]


def promised_cases() -> list[Case]:
    return [*_greedy(), *_sampled(), *_in_many_ways(), *_structured()]


def _plain(name: str, prompt: Any, max_tokens: int, **more: Any) -> Case:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return Case(name, PLAIN, body | more)


def _chat(name: str, text: str, max_tokens: int, **more: Any) -> Case:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    return Case(name, CHAT, body | {"temperature": 0} | more)


def _greedy() -> list[Case]:
    cases = [_plain(f"greedy {number}", start, 24) for number, start in enumerate(_STARTS)]
    cases += [_plain(f"greedy long {number}", start, 160, ignore_eos=True) for number, start in enumerate(_STARTS[:3])]
    cases += [_plain(f"common prefix {word}", _LONG + word, 20) for word in ("Words", "A name", "So")]
    return [*cases, _plain("urgent", _STARTS[1], 40, priority=-5), _chat("chat", "What is a list?", 40)]


def _sampled() -> list[Case]:
    drawn = {"temperature": 0.8, "top_p": 0.95}
    cases = [_plain(f"seed {seed}", start, 48, seed=seed, **drawn) for seed, start in enumerate(_STARTS, 5)]
    penalties = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1}
    return [
        *cases,
        _plain("seed long", _STARTS[0], 200, seed=-3, ignore_eos=True, **drawn),
        _plain("three answers", _STARTS[2], 32, seed=11, n=3, **drawn),
        _plain("penalties", _STARTS[0], 40, seed=12, **drawn, **penalties),
        _chat("chat with a seed", "Tell me about the sea.", 48, seed=13, **drawn),
    ]


def _in_many_ways() -> list[Case]:
    return [
        _plain("stop texts", _STARTS[2], 64, stop=[" the", "\n\n"], seed=21, temperature=0.8),
        _plain("log-probabilities", _STARTS[0], 24, logprobs=3),
        _plain("two answers with log-probabilities", _STARTS[1], 24, logprobs=1, n=2, seed=22, temperature=1.0),
        _plain("several prompts", list(_STARTS[:3]), 16),
        _plain("echo", _STARTS[3], 12, echo=True),
    ]


def _structured() -> list[Case]:
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
    return [
        _plain("schema", "A thing as JSON:", 48, guided_json=_SCHEMA),
        _plain("regex, two answers", "A date:", 24, guided_regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}", n=2, seed=31),
        _plain("choice", "The colour is", 12, guided_choice=["red", "green", "a dark blue"]),
        _plain("grammar", "Is it so?", 16, guided_grammar=_GRAMMAR, seed=32, temperature=1.0),
        _chat("chat with a schema", "Name a thing.", 48, response_format=schema),
    ]
