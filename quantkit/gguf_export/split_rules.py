"""Which of llama.cpp's splitting rules a byte-level tokenizer has: found by what both do to texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from quantkit.gguf_import.tokenizer import SPLIT_RULES

# The rules to choose from; where two cut alike, the first one.
_CANDIDATES = ("llama-bpe", "dbrx", "qwen2", "deepseek-r1-qwen", "smollm", "gpt-2", "tekken", "gpt-4o")
_PROBES = (
    "Hello world, it is 7 o'clock.",
    "I'LL say we'Ve done it, that's all: don't!",
    "in 42 ways",
    "in 1789 and 20041",
    "3.14159 of 1,000,000",
    "line\nnext\n\n\nlast\r\n",
    "  two  spaces   three\t\ttabs \n x",
    "HTTPServer camelCase ABCdef Éte naïve",
    "foo_bar(baz) += !!! -- /path/to\n",
    "你好 世界 привет мир नमस्ते कृपया",
    "a\u0301 e\u0301\u00a0b 🚀🚀 x²",
)


def nearest_rule(whole: Mapping[str, Any]) -> tuple[str, str | None]:
    """The name of the rule of a tokenizer.json, and a note where none cuts all texts as the tokenizer does."""
    given = _pre_tokenizer(whole)
    composes = "NFC" in json.dumps(whole.get("normalizer"))
    whole_words = bool(whole["model"].get("ignore_merges"))

    def distance(name: str) -> tuple[int, int]:
        rule = SPLIT_RULES[name]
        differing = len(_differing(given, rule.pre_tokenizer()))
        return differing, (rule.whole_words_first != whole_words) + (rule.composes != composes)

    best = min(_CANDIDATES, key=distance)
    differing = _differing(given, SPLIT_RULES[best].pre_tokenizer())
    if not differing:
        return best, None
    return best, (
        f"llama.cpp has no splitting rule like this tokenizer's; '{best}' is the nearest, and it cuts texts such as "
        f"{differing[0]!r} otherwise"
    )


def _differing(one: pre_tokenizers.PreTokenizer, other: pre_tokenizers.PreTokenizer) -> list[str]:
    return [text for text in _PROBES if one.pre_tokenize_str(text) != other.pre_tokenize_str(text)]


def _pre_tokenizer(whole: Mapping[str, Any]) -> pre_tokenizers.PreTokenizer:
    """The part of a tokenizer.json that splits; the library reads whole files only."""
    empty = json.loads(Tokenizer(models.BPE({}, [])).to_str())
    found: pre_tokenizers.PreTokenizer = Tokenizer.from_str(
        json.dumps(empty | {"pre_tokenizer": whole["pre_tokenizer"]})
    ).pre_tokenizer
    return found
