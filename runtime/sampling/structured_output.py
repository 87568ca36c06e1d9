"""Structured output: which tokens may come next, so that an answer is JSON, matches a regex or follows a grammar.

    GuideSpec --GuideCompiler--> Guide --mask--> (the sampler picks an allowed token) --advance--> mask ... finished

A spec is a plain value that travels between processes. A guide is the state of one answer. The parsing is llguidance's:
it compiles a grammar in milliseconds and a mask in microseconds, and knows how tokens spell bytes.

Whitespace in JSON is limited to a space, or a line break and its indentation: a weak model may take to whitespace, and
would otherwise never leave it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.errors import InputError, QuantkitError, did_you_mean
from quantkit.extras import require

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from transformers import PreTrainedTokenizerBase

Words = NDArray[np.int32]
GuideKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
JSON_WHITESPACE = r"\x20|\n\x20{0,32}"  # between two parts of JSON, at most once
# As written into a schema under "x-guidance". A schema's own settings there cannot undo these.
JSON_STYLE = {"whitespace_pattern": JSON_WHITESPACE, "item_separator": ",", "key_separator": ":"}
KEPT_GRAMMARS = 64
MOST_LEXER_STATES = 50_000  # of one grammar, 1 to 2 kB each; ordinary ones need some hundreds
LONGEST_REASON = 400  # characters of an error message that are passed on
_NAMES = {"json_schema": "JSON schema", "choice": "list of choices"}


class GuideBroken(QuantkitError):
    """An answer cannot follow its guide any longer: a forbidden token was taken, or the grammar is too complex."""


@dataclass(frozen=True)
class GuideSpec:
    """What an answer must look like. `text` is the schema (JSON), the regex, the choices (JSON list) or the grammar."""

    kind: GuideKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuideKind):
            raise InputError(f"there is no kind of guide '{self.kind}'; {did_you_mean(self.kind, get_args(GuideKind))}")
        if not isinstance(self.text, str):
            raise InputError(f"the {self.name} is {self.text!r}, but must be a text")

    @property
    def name(self) -> str:
        """The kind as messages name it."""
        return _NAMES.get(self.kind, self.kind)


class Guide:
    """The state of one answer. Guides do not affect each other; one may be used by one thread at a time."""

    def __init__(self, grammar: _Grammar, vocabulary: _Vocabulary, matcher: LLMatcher | None = None) -> None:
        self._grammar = grammar
        self._matcher = matcher or grammar.matcher.deep_copy()
        self._vocabulary = vocabulary
        self._words: Words | None = None  # the allowed tokens of the present state, once they were asked for

    def bitmask(self) -> torch.Tensor:
        """The allowed tokens as bits, the lowest first: int32 [ceil(vocab / 32)] on the CPU. Not to be changed."""
        return torch.from_numpy(self._allowed())

    def mask(self) -> torch.Tensor:
        """The allowed tokens: bool [vocab] on the CPU, never all False. End tokens, if the answer may end here."""
        bits = np.unpackbits(self._allowed().view(np.uint8), count=self._vocabulary.size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def mask_behind(self, guesses: tuple[int, ...]) -> torch.Tensor:
        """The allowed tokens if these came first. Raises GuideBroken where they may not; the guide stays as it is."""
        if self._matcher.is_error() or self._matcher.validate_tokens(list(guesses)) < len(guesses):
            raise GuideBroken("the guessed tokens do not fit the structured output")
        ahead = Guide(self._grammar, self._vocabulary, self._matcher.deep_copy())
        for token in guesses:
            ahead.advance(token)
        return ahead.mask()

    def advance(self, token: int) -> None:
        """Appends a token to the answer. Raises GuideBroken for one that is not allowed; the guide is unusable then."""
        self._words = None
        if not 0 <= token < self._vocabulary.size or not self._matcher.consume_token(token):
            self._grammar.worn = True
            raise GuideBroken(
                f"token {token} ({self._vocabulary.text_of(token)!r}) does not fit the structured output: "
                f"{_reason(self._matcher.get_error()) or 'the model has no such token'}"
            )

    @property
    def finished(self) -> bool:
        """Whether only an end token may follow, or one was taken."""
        if self._matcher.is_error():
            return False
        if self._matcher.is_stopped():
            return True
        return self._matcher.is_accepting() and not self._vocabulary.has_text_tokens(self._allowed())

    def _allowed(self) -> Words:
        if self._words is None:
            self._words = self._computed_words()
        return self._words

    def _computed_words(self) -> Words:
        words = self._vocabulary.no_words()
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, self._vocabulary.tokenizer_bytes)
        if self._matcher.is_error():
            self._grammar.worn = True
            raise GuideBroken(f"the structured output cannot go on: {_reason(self._matcher.get_error())}")
        words = self._vocabulary.trimmed(words)
        # In a dead end llguidance offers the end tokens, though the answer would be incomplete.
        if not self._matcher.is_accepting() and not self._vocabulary.has_text_tokens(words):
            raise GuideBroken("the structured output cannot go on: no token of this model leads to an allowed text")
        return words


class GuideCompiler:
    """Guides for one model. Keeps what it compiled: equal specs compile once. May be used by several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int, eos: tuple[int, ...]) -> None:
        """`vocab` is the length of the model's logits, which may exceed the tokenizer's number of tokens."""
        self._vocabulary = _Vocabulary(tokenizer, vocab, eos)
        self._compiled: OrderedDict[GuideSpec, _Grammar] = OrderedDict()  # the most recently used last
        self._lock = threading.Lock()

    def compile(self, spec: GuideSpec) -> Guide:
        """A guide at its beginning. Raises InputError that says what is wrong with the spec."""
        with self._lock:
            grammar = self._compiled.get(spec)
            if grammar is None or grammar.worn:
                grammar = self._compiled[spec] = self._grammar(spec)
            self._compiled.move_to_end(spec)
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            return Guide(grammar, self._vocabulary)

    def _grammar(self, spec: GuideSpec) -> _Grammar:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary.tokenizer, _grammar_of(spec), log_level=0, limits=_limits())
        if matcher.is_error():
            raise InputError(f"the {spec.name} cannot be used: {_reason(matcher.get_error())}")
        grammar = _Grammar(matcher)
        try:
            Guide(grammar, self._vocabulary).bitmask()
        except GuideBroken as broken:
            raise InputError(f"the {spec.name} cannot be used, for no text fits it ({broken})") from broken
        return grammar


def check_guide(spec: GuideSpec) -> None:
    """Raises InputError for a spec that is wrong for every model; needs no tokenizer."""
    import_llguidance()
    from llguidance import LLMatcher

    if error := LLMatcher.validate_grammar(_grammar_of(spec), limits=_limits()):
        raise InputError(f"the {spec.name} cannot be used: {_reason(error)}")


def import_llguidance() -> None:
    """Raises InputError where the package is missing."""
    require("structured output", "serve", "llguidance")


@dataclass
class _Grammar:
    """A matcher at its beginning. Its copies share the lexer's states: one that used them up takes all along."""

    matcher: LLMatcher
    worn: bool = False  # whether a guide broke, so that the next one needs a new matcher


class _Vocabulary:
    """The tokens of the model and how they are spelled. A set of tokens is an array of 32 bits each."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, eos: tuple[int, ...]) -> None:
        import_llguidance()
        from llguidance.hf import from_tokenizer

        try:
            self.tokenizer: LLTokenizer = from_tokenizer(tokenizer, eos_token=list(eos))
        except Exception as error:  # whatever its Rust code says
            raise InputError(f"structured output is not possible with this tokenizer: {error}") from error
        self.size = size
        self.tokenizer_bytes = 4 * _words(self.tokenizer.vocab_size)
        self._count = _words(size)
        self._below_size = _bits(range(size), self._count)
        self._no_end = ~_bits(eos, self._count)

    def no_words(self) -> Words:
        """Room for what llguidance writes, and for the model's tokens that the tokenizer does not have."""
        return np.zeros(max(self._count, self.tokenizer_bytes // 4), dtype=np.int32)

    def trimmed(self, words: Words) -> Words:
        """Without the tokenizer's tokens that the model does not have."""
        return words[: self._count] & self._below_size

    def has_text_tokens(self, words: Words) -> bool:
        """Whether any token but an end token is allowed."""
        return bool((words & self._no_end).any())

    def text_of(self, token: int) -> str:
        return self.tokenizer.decode_str([token]) if 0 <= token < self.tokenizer.vocab_size else ""


def _words(bits: int) -> int:
    return (bits + 31) // 32


def _bits(tokens: range | tuple[int, ...], words: int) -> Words:
    flags = np.zeros(words * 32, dtype=np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)


def _grammar_of(spec: GuideSpec) -> str:
    """The spec as llguidance's grammar."""
    from llguidance import LLMatcher

    try:
        if spec.kind == "json_object":
            return _json_grammar({"type": "object"})
        if spec.kind == "json_schema":
            return _json_grammar(_checked_schema(_parsed(spec)))
        if spec.kind == "regex":
            return _regex_grammar(spec.text)
        lark = _choice_grammar(_parsed(spec)) if spec.kind == "choice" else spec.text
        return LLMatcher.grammar_from_lark(lark)
    except ValueError as error:  # what JSON or Unicode forbids
        raise InputError(f"the {spec.name} cannot be used: {error}") from error


def _regex_grammar(regex: str) -> str:
    from llguidance import LLMatcher, regex_to_lark

    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # llguidance would drop it
        raise InputError("the regex ends with a single backslash; write two for the character itself")
    if not regex:
        return LLMatcher.grammar_from_regex(regex)
    # \d, \w and \s are ASCII, as in the patterns of a JSON schema and as with Python's re.ASCII.
    return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(regex, 'dws')}/")


def _json_grammar(schema: str | dict[str, Any]) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)  # type: ignore[arg-type]


def _parsed(spec: GuideSpec) -> Any:
    try:
        return json.loads(spec.text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the {spec.name} is no JSON: {error}") from error


def _checked_schema(schema: Any) -> dict[str, Any]:
    if schema is True:  # a schema too: any value
        return {}
    if not isinstance(schema, dict):
        raise InputError(f"the JSON schema is {schema!r}, but must be an object such as {{'type': 'object'}}")
    return schema


def _choice_grammar(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InputError(f"the list of choices is {choices!r}, but must be a list of one text or more")
    for choice in choices:
        choice.encode()  # half a surrogate pair is no text
    return "start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))


def _reason(error: str) -> str:
    """llguidance's message in one line, without the state of its parser and the drawing of where it was."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines()]
    complaints = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (complaints[0] if complaints else " ".join(filter(None, lines)))[:LONGEST_REASON]
