"""tokenizer.json and tokenizer_config.json, built from the vocabulary in a GGUF file.

A GGUF file keeps tokens, merges and the *name* of the rule that splits text before the merges apply. Two kinds exist:

    gpt2    byte-level BPE. The splitting rule is named by `tokenizer.ggml.pre` and must be known here: a wrong one
            gives other tokens for the same text and a worse model, without any error. So unknown names are refused.
    llama   SentencePiece BPE. Spaces become '▁', unknown characters become bytes; the merges follow from the scores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quantkit.errors import InputError, did_you_mean
from quantkit.gguf_import.reader import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _words(digits: str) -> str:
    """The rule of GPT-4's family: contractions, words with one sign before them, digits, signs, line ends, spaces."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased_words(digits: str = r"\p{N}", ending: str = "") -> str:
    """Mistral's Tekken rule: words also end where lower case turns into upper case. GPT-4o's has contractions, too."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    sign = r"[^\r\n\p{L}\p{N}]?"
    words = f"{sign}{upper}*{lower}+{ending}|{sign}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}" + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class SplitRule:
    """How a byte-level family cuts text before merging, and what it does besides."""

    pattern: str | None = None  # None: GPT-2's own rule
    single_digits: bool = False  # cut every digit off first
    whole_words_first: bool = False  # a piece that is a token needs no merges
    adds_bos: bool = False  # where the file does not say
    composes: bool = False  # Unicode NFC before anything else

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """What cuts text, and turns bytes into the letters that stand for them."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


_GPT2 = SplitRule()
_STARCODER = SplitRule(single_digits=True)
_LLAMA3 = SplitRule(_words(r"\p{N}{1,3}"), whole_words_first=True, adds_bos=True)
_QWEN2 = SplitRule(_words(r"\p{N}"), composes=True)
SPLIT_RULES = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": SplitRule(_words(r"\p{N}")),
    "dbrx": SplitRule(_words(r"\p{N}{1,3}")),
    "gpt-4o": SplitRule(_cased_words(r"\p{N}{1,3}", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?")),
    "tekken": SplitRule(_cased_words(), whole_words_first=True, adds_bos=True),
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file by id, with their types and the ids that have a role."""

    tokens: list[str]
    types: list[int]
    roles: dict[str, int]  # bos_token -> 1, ...

    @property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def named(self) -> dict[str, str]:
        return {role: self.tokens[index] for role, index in self.roles.items()}


def tokenizer_files(file: GgufFile, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of tokenizer.json and tokenizer_config.json."""
    vocabulary = _vocabulary(file, config)
    kind = file.need("tokenizer.ggml.model", str)
    if kind == "gpt2":
        rule = _split_rule(file)
        tokenizer, adds_bos = _byte_level(file, vocabulary, rule), rule.adds_bos
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(file, vocabulary), True
    else:
        raise InputError(f"{file.path}: a tokenizer of kind '{kind}' cannot be imported; known: gpt2, llama")
    _add_whole_tokens(tokenizer, vocabulary)
    settings = _settings(file, vocabulary, config, adds_bos)
    _add_ends(tokenizer, vocabulary, settings)
    return json.loads(tokenizer.to_str()), settings


def _vocabulary(file: GgufFile, config: dict[str, Any]) -> Vocabulary:
    tokens = file.find("tokenizer.ggml.tokens", list)
    if not tokens:
        raise InputError(f"{file.path} holds no tokenizer; take a GGUF file that was converted with its vocabulary")
    if len(tokens) > config["vocab_size"]:
        raise InputError(f"{file.path} lists {len(tokens)} tokens, but the model has only {config['vocab_size']}")
    types = file.find("tokenizer.ggml.token_type", list) or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise InputError(f"{file.path} lists {len(tokens)} tokens, but types for {len(types)}; get the file again")
    ids = {role: file.find(f"tokenizer.ggml.{name}_token_id", int) for role, name in _ROLES.items()}
    if ids["unk_token"] is None and _UNKNOWN in types:
        ids["unk_token"] = types.index(_UNKNOWN)
    roles = {role: index for role, index in ids.items() if index is not None and 0 <= index < len(tokens)}
    return Vocabulary(_distinct(tokens), types, roles)


def _distinct(tokens: list[str]) -> list[str]:
    """The same tokens, with a stand-in for repeated and empty ones: an id without a name would shift the others."""
    seen = {""}
    named = []
    for index, token in enumerate(tokens):
        named.append(f"<|repeated_{index}|>" if token in seen else token)
        seen.add(token)
    return named


def _split_rule(file: GgufFile) -> SplitRule:
    name = file.find("tokenizer.ggml.pre", str) or "default"
    if name == "default" and file.architecture in ("qwen2", "qwen3"):
        name = "qwen2"  # files from before the key existed; all Qwen models split alike
    if name not in SPLIT_RULES:
        raise InputError(
            f"{file.path}: the tokenizer's splitting rule '{name}' is not known, and another would give wrong tokens; "
            f"{did_you_mean(name, SPLIT_RULES)}"
        )
    return SPLIT_RULES[name]


def _byte_level(file: GgufFile, vocabulary: Vocabulary, rule: SplitRule) -> Tokenizer:
    pairs = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges", list)]
    merges = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
    if len(merges) < len(pairs):
        raise InputError(f"{file.path}: a merge of its tokenizer is not a pair of tokens; get the file again")
    tokenizer = _bpe(file, vocabulary, merges, ignore_merges=rule.whole_words_first)
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bpe(file: GgufFile, vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary.ids, merges, **options))
    except Exception as error:  # the tokenizers library has no class of its own for merges that miss their tokens
        raise InputError(f"{file.path}: its vocabulary makes no tokenizer ({error}); get the file again") from error


def _sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    scores = file.need("tokenizer.ggml.scores", list)
    if len(scores) != len(vocabulary.tokens):
        raise InputError(f"{file.path} has scores for {len(scores)} of {len(vocabulary.tokens)} tokens; get it again")
    unknown = vocabulary.named().get("unk_token")
    merges = _merges_by_score(vocabulary, scores)
    tokenizer = _bpe(file, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    leading_space = file.find("tokenizer.ggml.add_space_prefix", bool) is not False
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if leading_space else spaces
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if leading_space else []))
    return tokenizer


def _merges_by_score(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token from two others, best score first, as SentencePiece would try them."""
    ids = {token: index for token, index in vocabulary.ids.items() if vocabulary.types[index] == _NORMAL}
    found = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right))
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in sorted(found)]


def _add_whole_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control tokens are never cut and vanish from decoded text; the user's own tokens are never cut."""
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])


def _settings(file: GgufFile, vocabulary: Vocabulary, config: dict[str, Any], adds_bos: bool) -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    named = vocabulary.named()
    said_bos = file.find("tokenizer.ggml.add_bos_token", bool)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # tokenizer.json says it all
        **named,
        "add_bos_token": (adds_bos if said_bos is None else said_bos) and "bos_token" in named,
        "add_eos_token": bool(file.find("tokenizer.ggml.add_eos_token", bool)) and "eos_token" in named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    template = _chat_template(file)
    return {**settings, "chat_template": template} if template else settings


def _chat_template(file: GgufFile) -> str | list[dict[str, str]] | None:
    """The template as it stands in the file, or the list of named ones where the model has several."""
    default = file.find("tokenizer.chat_template", str)
    start = "tokenizer.chat_template."
    named = {key.removeprefix(start): file.need(key, str) for key in file.fields if key.startswith(start)}
    if not named:
        return default
    every = {"default": default, **named} if default else named
    return [{"name": name, "template": template} for name, template in every.items()]


def _add_ends(tokenizer: Tokenizer, vocabulary: Vocabulary, settings: dict[str, Any]) -> None:
    """Puts the beginning and end tokens around a text, where the model wants them."""
    roles = [role for role in ("bos_token", "eos_token") if settings[f"add_{role}"]]
    if not roles:
        return
    named = vocabulary.named()
    before = [named["bos_token"]] if "bos_token" in roles else []
    after = [named["eos_token"]] if "eos_token" in roles else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=[(named[role], vocabulary.roles[role]) for role in roles],
    )
