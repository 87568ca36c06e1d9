"""The tokenizer of a model as metadata of a GGUF file: tokens, their kinds, merges or scores, special tokens.

gpt2    byte-level BPE: merges, and the name of the rule that splits text before them (`split_rules.py`)
llama   SentencePiece BPE: a score for every token. tokenizer.json has merges instead; a token's score is minus the
        place of its first merge, which makes llama.cpp join pieces in the same order
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import TokenType
from transformers import PreTrainedTokenizerBase

from quantkit.checkpoint import read_json
from quantkit.errors import InputError
from quantkit.gguf_export.split_rules import nearest_rule

_ROLES = {"bos_token_id": "bos", "eos_token_id": "eos", "unk_token_id": "unknown", "pad_token_id": "padding"}
_MORE_ENDS = ("eot", "eom")  # where llama.cpp looks for further tokens that end a text
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# llama.cpp takes added tokens of these forms for control tokens whatever the file says, and warns.
_CONTROL_LOOK = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]")
_LAST = -1e6  # the score of a token that no merge makes


@dataclass(frozen=True)
class _Vocabulary:
    """tokenizer.json, as far as a GGUF file holds it."""

    tokens: dict[int, str]
    added: dict[int, dict[str, Any]]
    merges: list[tuple[str, str]]
    model: dict[str, Any]
    whole: dict[str, Any]

    @property
    def sentencepiece(self) -> bool:
        return bool(self.model.get("byte_fallback"))


def tokenizer_keys(
    tokenizer: PreTrainedTokenizerBase, folder: Path, vocab_size: int
) -> tuple[dict[str, Any], str | None]:
    """The keys of a model with so many embeddings, and a note where llama.cpp will cut some texts otherwise."""
    vocabulary = _read(tokenizer, folder)
    if max(vocabulary.tokens) >= vocab_size:
        raise InputError(f"{folder} has {max(vocabulary.tokens) + 1} tokens, but its model only {vocab_size}")
    tokens, types = _tokens(vocabulary, tokenizer.unk_token_id, vocab_size)
    keys: dict[str, Any] = {"tokens": tokens, "token_type": types}
    note = None
    if vocabulary.sentencepiece:
        keys |= {"model": "llama", "pre": "default", "scores": _scores(vocabulary, vocab_size)}
        keys["add_space_prefix"] = _prepends_space(vocabulary.whole)
    else:
        rule, note = nearest_rule(vocabulary.whole)
        keys |= {"model": "gpt2", "pre": rule, "merges": [" ".join(pair) for pair in vocabulary.merges]}
    keys |= _special_ids(tokenizer, folder) | _ends(tokenizer)
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | _template_keys(tokenizer), note


def _read(tokenizer: PreTrainedTokenizerBase, folder: Path) -> _Vocabulary:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole: dict[str, Any] = {"model": {"type": type(tokenizer).__name__}}
    if backend is not None:
        whole = json.loads(backend.to_str())
    model = whole["model"]
    if model["type"] != "BPE" or not (model["byte_fallback"] or "ByteLevel" in json.dumps(whole["pre_tokenizer"])):
        raise InputError(
            f"{folder} has a tokenizer of kind {model['type']} that GGUF files of its family do not hold; "
            "byte-level BPE and SentencePiece BPE can be written"
        )
    added = {token["id"]: token for token in whole["added_tokens"]}
    tokens = {index: token for token, index in model["vocab"].items()}
    tokens |= {index: token["content"] for index, token in added.items()}
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    return _Vocabulary(tokens, added, merges, model, whole)


def _tokens(vocabulary: _Vocabulary, unknown: int | None, vocab_size: int) -> tuple[list[str], list[int]]:
    """The text and the kind of every row of the embeddings."""
    tokens, types = [], []
    for index in range(vocab_size):
        token = vocabulary.tokens.get(index)
        if token is None:
            tokens.append(f"[PAD{index}]")
            types.append(TokenType.UNUSED)
            continue
        kind = _kind(vocabulary, index, token, unknown)
        tokens.append(token.replace("▁", " ") if kind == TokenType.USER_DEFINED else token)
        types.append(kind)
    return tokens, [int(kind) for kind in types]


def _kind(vocabulary: _Vocabulary, index: int, token: str, unknown: int | None) -> TokenType:
    if vocabulary.sentencepiece and index == unknown:
        return TokenType.UNKNOWN
    if vocabulary.sentencepiece and _BYTE.fullmatch(token):
        return TokenType.BYTE
    if index not in vocabulary.added:
        return TokenType.NORMAL
    special = vocabulary.added[index]["special"] or _CONTROL_LOOK.fullmatch(token)
    return TokenType.CONTROL if special else TokenType.USER_DEFINED


def _scores(vocabulary: _Vocabulary, vocab_size: int) -> list[float]:
    places: dict[str, int] = {}
    for place, pair in enumerate(vocabulary.merges):
        places.setdefault("".join(pair), place)
    found = (places.get(vocabulary.tokens.get(index, "")) for index in range(vocab_size))
    return [_LAST if place is None else -float(place) for place in found]


def _prepends_space(whole: Mapping[str, Any]) -> bool:
    """Whether a text is read as if a space stood before it."""
    steps = json.dumps([whole.get("normalizer"), whole.get("pre_tokenizer")])
    scheme = re.search(r'"prepend_scheme": "(\w+)"', steps)
    return '"Prepend"' in steps or (scheme is not None and scheme[1] != "never")


def _special_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, int]:
    """Tokens with a role; further tokens that end a text, which generation_config.json lists."""
    found = {name: getattr(tokenizer, role) for role, name in _ROLES.items()}
    file = folder / "generation_config.json"
    ends = read_json(file, "").get("eos_token_id") if file.is_file() else None
    others = [end for end in (ends if isinstance(ends, list) else [ends]) if end not in (None, found["eos"])]
    found |= dict(zip(_MORE_ENDS, others, strict=False))
    return {f"{name}_token_id": int(token) for name, token in found.items() if token is not None}


def _ends(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Whether a text gets tokens at its beginning and end: asked of the tokenizer."""
    ids = tokenizer("a").input_ids
    return {
        "add_bos_token": tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id,
        "add_eos_token": tokenizer.eos_token_id is not None and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id,
    }


def _template_keys(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The chat template; where there are several, the others under their names."""
    template = tokenizer.chat_template
    if not template:
        return {}
    named = template if isinstance(template, dict) else {"default": template}
    keys: dict[str, Any] = {
        f"tokenizer.chat_template.{name}": text for name, text in named.items() if name != "default"
    }
    if keys:
        keys["tokenizer.chat_templates"] = [name for name in named if name != "default"]
    return keys | ({"tokenizer.chat_template": named["default"]} if "default" in named else {})
