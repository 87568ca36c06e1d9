"""The name of a tokenizer's splitting rule, found by what it does."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers

from quantkit.gguf_export.split_rules import nearest_rule
from quantkit.gguf_import.tokenizer import SPLIT_RULES
from quantkit.reference import load_tokenizer
from tiny_tokenizers import save_byte_level


@pytest.mark.parametrize(
    "name", ["llama-bpe", "dbrx", "qwen2", "deepseek-r1-qwen", "smollm", "gpt-2", "tekken", "gpt-4o"]
)
def test_every_rule_is_found(name: str) -> None:
    rule = SPLIT_RULES[name]
    tokenizer = Tokenizer(models.BPE({}, [], ignore_merges=rule.whole_words_first))
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    assert nearest_rule(json.loads(tokenizer.to_str())) == (name, None)


def test_nearest_rule_of_the_bundled_model_differs_in_long_numbers_only() -> None:
    name, note = nearest_rule(json.loads(load_tokenizer("demo").backend_tokenizer.to_str()))
    assert name == "dbrx"
    assert note is not None
    assert "'in 1789 and 20041'" in note


def test_a_rule_of_ones_own_is_no_known_one(tmp_path: Path) -> None:
    tokenizer = save_byte_level(tmp_path, pattern=r"\s+|\S+")
    assert nearest_rule(json.loads(tokenizer.backend_tokenizer.to_str()))[1] is not None
