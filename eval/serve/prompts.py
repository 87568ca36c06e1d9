"""Prompts to send: random token ids, random words, or those of a file. Number N is the same in every run of a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quantkit.errors import InputError, StorageError
from quantkit.eval.serve.client import Client
from quantkit.eval.serve.facts import Facts, tokenize

Prompt = str | list[int] | list[dict[str, Any]]  # a text, token ids, or messages
ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

# Frequent English words: nearly every tokenizer has one token for each, with the space before it.
_FREQUENT = """
the of and to in that is was he for it with as his on be at by had not are but from or have an they which one you were
her all she there would their we him been has when who will more no if out so said what up its about into than them can
only other new some could time these two may then do first any my now such like our over man me even most made after
also did many before must through back years where much your way well down should because each just those people how
too little state good very make world still own see men work long get here between both life being under never day same
another know while last might us great old year off come since against go came right used take three states himself few
house use during without again place american around however home small found part school every public need less
question government small number system side fact hand night head yet four city face room order eyes water large
white country best often family name book power point light name second early law young money power group body study
"""
WORDS = tuple(dict.fromkeys(_FREQUENT.split()))
_SAMPLE = 200  # words that are counted to learn how many tokens one has


class Prompts(Protocol):
    """Where prompts come from."""

    @property
    def note(self) -> str: ...  # what a reader should know about them; may be empty

    def prompt(self, number: int) -> Prompt: ...


@dataclass(frozen=True)
class IdPrompts:
    """Random token ids: exactly as long as asked."""

    ids: Sequence[int]
    length: int
    seed: int
    note: str = ""

    def prompt(self, number: int) -> Prompt:
        return random.Random(f"{self.seed} {number}").choices(self.ids, k=self.length)


@dataclass(frozen=True)
class WordPrompts:
    """Random words, so many that they have about the asked number of tokens."""

    words: int
    seed: int
    note: str = ""

    def prompt(self, number: int) -> Prompt:
        return " ".join(random.Random(f"{self.seed} {number}").choices(WORDS, k=self.words))


@dataclass(frozen=True)
class FilePrompts:
    """A file's prompts in order, from the first again after the last."""

    prompts: tuple[Prompt, ...]
    note: str = ""

    def prompt(self, number: int) -> Prompt:
        return self.prompts[number % len(self.prompts)]


@dataclass(frozen=True)
class RequestMaker:
    """Writes the requests of one benchmark. Prompts of different loads differ, so that none is found in a cache."""

    model: str
    endpoint: str
    prompts: Prompts
    ignore_eos: bool

    @property
    def path(self) -> str:
        return ENDPOINTS[self.endpoint]

    def body(self, number: int, new_tokens: int) -> bytes:
        prompt = self.prompts.prompt(number)
        request: dict[str, Any] = {"model": self.model, "max_tokens": new_tokens, "temperature": 0, "stream": True}
        request["stream_options"] = {"include_usage": True}
        if self.ignore_eos:  # not in OpenAI's own interface, and refused there: sent only where it is wanted
            request["ignore_eos"] = True
        if self.endpoint == "chat":
            request["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            request["prompt"] = prompt
        return json.dumps(request, separators=(",", ":")).encode()


async def synthetic_prompts(client: Client, facts: Facts, endpoint: str, length: int, seed: int) -> Prompts:
    """Token ids where the endpoint takes them and the server says which there are; else words."""
    if endpoint == "completions" and facts.vocab is not None:
        return IdPrompts(range(facts.vocab), length, seed)
    tokens = await tokenize(client, facts.model, " ".join(_sample()))
    if tokens is None:
        return WordPrompts(length, seed, "the server has no /tokenize: one word is taken for one token of a prompt")
    if endpoint == "completions":
        return IdPrompts(sorted(set(tokens)), length, seed)
    return WordPrompts(_words_for(length, tokens), seed)


async def file_prompts(client: Client, facts: Facts, file: Path, endpoint: str, length: int) -> FilePrompts:
    """JSON lines with `prompt` or `messages`; any other text is cut into prompts of about `length` tokens."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StorageError(f"{file} is not UTF-8 text") from None
    if file.suffix in (".jsonl", ".json") or text.lstrip().startswith("{"):
        found = tuple(
            _from_line(line, f"{file}, line {number}", endpoint)
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip()
        )
        note = ""
    else:
        tokens = await tokenize(client, facts.model, " ".join(_sample()))
        found = _cut(text.split(), length if tokens is None else _words_for(length, tokens))
        note = "" if tokens else "the server has no /tokenize: one word is taken for one token of a prompt"
    if not found:
        raise InputError(f"{file} has no prompts")
    return FilePrompts(found, note)


def _from_line(line: str, place: str, endpoint: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError:
        raise InputError(f"{place} is not JSON; a text file without JSON must not begin with '{{'") from None
    prompt = entry.get("prompt", entry.get("messages")) if isinstance(entry, dict) else None
    if isinstance(prompt, str) and prompt:
        return prompt
    wanted, other = (dict, int) if endpoint == "chat" else (int, dict)
    if isinstance(prompt, list) and prompt and all(isinstance(part, wanted) for part in prompt):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(part, other) for part in prompt):
        kind, right = ("token ids", "completions") if endpoint == "chat" else ("messages", "chat")
        raise InputError(f"{place} has {kind}; they need --endpoint {right}")
    raise InputError(f'{place} must have "prompt" or "messages"')


def _cut(words: list[str], length: int) -> tuple[Prompt, ...]:
    """Pieces of so many words; a rest that is much shorter is left out unless it is all there is."""
    pieces = [words[start : start + length] for start in range(0, len(words), length)]
    if len(pieces) > 1 and len(pieces[-1]) < length / 2:
        pieces.pop()
    return tuple(" ".join(piece) for piece in pieces)


def _sample() -> list[str]:
    return random.Random(0).choices(WORDS, k=_SAMPLE)


def _words_for(length: int, sample_tokens: list[int]) -> int:
    return max(1, round(length * _SAMPLE / len(sample_tokens)))
