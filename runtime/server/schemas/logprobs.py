"""Log-probabilities in OpenAI's two shapes: a list of tokens for chats, four lists for plain completions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST = -9999.0  # stands for minus infinity, which JSON cannot write
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte that is no token
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # how it writes a space


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability, and the most probable ones in its place. None: nothing predicts it."""

    id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]


class TokenTexts:
    """How single tokens read. What was asked for is kept: there are as many as the vocabulary has at most."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int) -> str:
        return self._of(token_id)[0]

    def spelling(self, token_id: int) -> bytes:
        return self._of(token_id)[1]

    def _of(self, token_id: int) -> tuple[str, bytes]:
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def _read(self, token_id: int) -> tuple[str, bytes]:
        text = str(self._tokenizer.decode([token_id]))
        piece = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if piece.startswith(_WORD_START) and not text.startswith(" "):
            text = f" {text}"  # dropped by the decoder at the beginning of a text only
        return text, _spelled(piece) if _UNFINISHED in text else text.encode()


def _spelled(piece: str) -> bytes:
    """The bytes of a token that is no whole characters."""
    found = _BYTE.fullmatch(piece)
    if found:
        return bytes([int(found[1], 16)])
    if all(letter in _BYTES_OF_LETTERS for letter in piece):
        return bytes(_BYTES_OF_LETTERS[letter] for letter in piece)
    return piece.encode()


def _bytes_of_letters() -> dict[str, int]:
    """Byte-level tokenizers write a printable byte as itself and the others as letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    return {chr(value): value for value in printable} | {chr(256 + place): v for place, v in enumerate(others)}


_BYTES_OF_LETTERS = _bytes_of_letters()


def chat_logprobs(tokens: Sequence[Scored], texts: TokenTexts) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        spelled = list(texts.spelling(token_id))
        return {"token": texts.text(token_id), "logprob": finite(logprob), "bytes": spelled}

    content = [
        entry(token.id, token.logprob) | {"top_logprobs": [entry(*pair) for pair in token.top]}
        for token in tokens
    ]  # fmt: skip
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Scored], texts: TokenTexts, offset: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of a plain completion; `offset` is where the first token stands in the text."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        text = texts.text(token.id)
        found["tokens"].append(text)
        found["token_logprobs"].append(None if token.logprob is None else finite(token.logprob))
        found["top_logprobs"].append(_alternatives(token, texts))
        found["text_offset"].append(offset)
        offset += len(text)
    return found


def likeliest(answers: Sequence[Sequence[Scored]]) -> list[int]:
    """The numbers of answers, those with the highest log-probability per token first: what OpenAI's and TGI's best_of
    means."""

    def mean(number: int) -> float:
        tokens = answers[number]
        return sum(finite(token.logprob) for token in tokens) / len(tokens) if tokens else LEAST

    return sorted(range(len(answers)), key=mean, reverse=True)


def _alternatives(token: Scored, texts: TokenTexts) -> dict[str, float] | None:
    """The chosen token is always among them. Of different tokens with one text, the most probable counts."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for token_id, value in [*token.top, (token.id, token.logprob)]:
        found.setdefault(texts.text(token_id), finite(value))
    return found


def finite(logprob: float | None) -> float:
    return LEAST if logprob is None else max(logprob, LEAST)
