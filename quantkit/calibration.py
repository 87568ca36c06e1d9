"""Calibration data: which tokens a method looks at, chosen once and recorded, so that two methods compare fairly.

A source is one of

    notes.txt                     a text, tokenized as it stands (any ending but .jsonl)
    chats.jsonl                   a document a line: {"text": ...} or {"messages": [...]}
    datasets:ORG/NAME:CONFIG@SPLIT  a dataset of the hub with such columns; `:CONFIG` and `@SPLIT` may be left out

Documents are tokenized one by one and packed end to end, so that no window is padded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quantkit.bundled import CALIBRATION_TEXT
from quantkit.errors import InputError, StorageError
from quantkit.extras import require
from quantkit.token_windows import StartToken, cut_windows, start_token, text_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HUB = "datasets:"
_HUB_SOURCE = re.compile(r"datasets:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^:@]+))?(?:@(?P<split>[^:@]+))?")
_BATCH = 16  # documents tokenized at once, in parallel; also the most that are read from a stream in vain
_LOOK_AHEAD = 256  # tokens that must follow the last one taken: text further on never changes how it was cut
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell half a character, no tokenizer takes it
_KEYS = "'text' or 'messages'"


class Settings(Protocol):
    """What a recipe says about calibration; None where it is silent."""

    @property
    def source(self) -> str | None: ...
    @property
    def samples(self) -> int | None: ...
    @property
    def seq_len(self) -> int | None: ...
    @property
    def seed(self) -> int | None: ...


@dataclass(frozen=True)
class Calibration:
    """Where the tokens come from: `samples` windows of `seq_len` tokens, drawn from a source by `seed`."""

    source: str | Path = CALIBRATION_TEXT
    samples: int = 128
    seq_len: int = 512
    seed: int = 0

    @classmethod
    def from_recipe(
        cls,
        recipe: Settings,
        *,
        source: str | Path | None = None,
        samples: int | None = None,
        seq_len: int | None = None,
        seed: int | None = None,
    ) -> Calibration:
        """What the arguments say, else the recipe, else the defaults; None says nothing."""
        values: dict[str, Any] = {"source": source, "samples": samples, "seq_len": seq_len, "seed": seed}
        for name, value in values.items():
            values[name] = getattr(recipe, name) if value is None else value
        return cls(**{name: value for name, value in values.items() if value is not None})

    def tokens(self, tokenizer: PreTrainedTokenizerBase, context: int) -> Tensor:
        """Token ids [samples, seq_len]; fewer samples where the source has no more."""
        if not 2 <= self.seq_len <= context:
            raise InputError(
                f"calibration sequences of {self.seq_len} tokens do not fit the model; choose 2 to {context}"
            )
        if self.samples < 1:
            raise InputError(f"calibration with {self.samples} samples; choose 1 or more")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"calibration with seed {self.seed}; choose 0 or more, below 2**63")
        windows = self._windows(tokenizer)
        chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(self.seed))[: self.samples]
        return windows[chosen]

    def record(self, tokens: Tensor, start: StartToken | None = None) -> dict[str, Any]:
        """What a log must hold to repeat this. `samples` is less than `asked` where the source has no more."""
        source = str(self.source)
        begun = {} if start is None else {"start_token": start.text}
        return begun | {
            "source": source if source.startswith(_HUB) else Path(source).name,
            "default": Path(source) == CALIBRATION_TEXT,
            "samples": tokens.shape[0],
            "asked": self.samples,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "tokens_sha256": hashlib.sha256(tokens.to(torch.int32).numpy().tobytes()).hexdigest(),
        }

    def _windows(self, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """Whole windows [windows, seq_len] to draw from: all of a file, the first `samples` of a dataset."""
        source, start = str(self.source), start_token(tokenizer)
        if source.startswith(_HUB):
            enough = self.samples * text_tokens(self.seq_len, start)
            enough += start is not None  # a chat template may bring its own
            ids = _packed(tokenizer, _documents(tokenizer, hub_rows(source)), enough)
        elif not Path(source).exists():
            raise StorageError(f"no text '{source}'; give a text file, a .jsonl file or a dataset as {_HUB}ORG/NAME")
        elif source.lower().endswith(".jsonl"):
            ids = _packed(tokenizer, _documents(tokenizer, _jsonl_rows(Path(source))))
        else:
            return token_windows(tokenizer, Path(source), self.seq_len)
        return cut_windows(ids, self.seq_len, source, start)


def token_windows(
    tokenizer: PreTrainedTokenizerBase,
    text_file: Path,
    window: int,
    count: int | None = None,
    *,
    begin: bool = True,
) -> Tensor:
    """A text as whole windows of token ids [windows, window]; a short rest is dropped.

    No special tokens but the one that the tokenizer puts before every text, with which each window begins, unless
    `begin` is False. With `count` only the first windows, and only as much of the text is tokenized as decides them.
    """
    start = start_token(tokenizer) if begin else None
    try:
        text = text_file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read the text {text_file}: {error}") from error
    if count is None:
        ids = _text_ids(tokenizer, text)
    else:
        ids = _first_ids(tokenizer, text, count * text_tokens(window, start))
    return cut_windows(ids, window, str(text_file), start)


def _first_ids(tokenizer: PreTrainedTokenizerBase, text: str, enough: int) -> Tensor:
    """The first `enough` token ids of a text; all of them where it has fewer."""
    characters = 5 * (enough + _LOOK_AHEAD)
    while characters < len(text):
        ids = _text_ids(tokenizer, text[:characters])
        if len(ids) >= enough + _LOOK_AHEAD:
            return ids[:enough]
        characters *= 2
    return _text_ids(tokenizer, text)[:enough]


def _text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)


class _Row(NamedTuple):
    """One object of a collection, as it was read, and where it stands, for errors."""

    where: str
    value: object


class _Document(NamedTuple):
    """A text to tokenize. A plain one is closed by the end-of-text token; a chat template has put in its own."""

    text: str
    plain: bool


def _packed(tokenizer: PreTrainedTokenizerBase, documents: Iterator[_Document], enough: int | None = None) -> Tensor:
    """Documents end to end, [tokens]; reads on only until there are `enough` tokens."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces = [torch.empty(0, dtype=torch.long)]
    count = 0
    while batch := list(itertools.islice(documents, _BATCH)):
        encoded = tokenizer([document.text for document in batch], add_special_tokens=False, verbose=False)["input_ids"]
        for document, ids in zip(batch, encoded, strict=True):
            pieces.append(torch.tensor(ids + end if document.plain else ids, dtype=torch.long))
            count += len(pieces[-1])
        if enough is not None and count >= enough:
            break
    return torch.cat(pieces)[:enough]


def _documents(tokenizer: PreTrainedTokenizerBase, rows: Iterable[_Row]) -> Iterator[_Document]:
    """The texts of rows, chats as the model's own template writes them; empty texts are left out."""
    for where, row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{where}: {reprlib.repr(row)} is not an object with {_KEYS}")
        if "text" in row:
            document = _Document(row["text"], plain=True)
        elif "messages" in row:
            document = _Document(_chat(tokenizer, where, row["messages"]), plain=False)
        else:
            raise InputError(f"{where}: the keys are {', '.join(map(str, row)) or 'none'}; one of them must be {_KEYS}")
        if not isinstance(document.text, str):
            raise InputError(f"{where}: 'text' is {reprlib.repr(document.text)}, but must be text")
        if _SURROGATE.search(document.text):
            raise InputError(f"{where}: holds half a character (a lone surrogate); write it whole")
        if document.text:
            yield document


def _chat(tokenizer: PreTrainedTokenizerBase, where: str, messages: object) -> str:
    """A conversation as text."""
    from jinja2 import TemplateError

    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise InputError(
            f"{where}: 'messages' is {reprlib.repr(messages)}, but must be a list of objects with role and content"
        )
    if not tokenizer.chat_template:
        raise InputError(f"{where}: 'messages' need a chat template and this model's tokenizer has none; give 'text'")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, ValueError) as error:  # what templates raise, by intent or over a missing key
        raise InputError(f"{where}: the model's chat template refuses these messages: {_first_line(error)}") from error


def _jsonl_rows(file: Path) -> Iterator[_Row]:
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _json_row(f"{file}, line {number}", line)
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {file}: {error}") from error


def _json_row(where: str, line: str) -> _Row:
    try:
        return _Row(where, json.loads(line))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}); every line must be one object with {_KEYS}") from error


def hub_rows(source: str) -> Iterator[_Row]:
    """The rows of a dataset in their own order, streamed. Runs no code of the dataset."""
    match = _HUB_SOURCE.fullmatch(source)
    if match is None:
        raise InputError(f"'{source}' is not of the form {_HUB}ORG/NAME, {_HUB}ORG/NAME:CONFIG or ...@SPLIT")
    require(source, "calibration")
    from datasets import load_dataset

    try:
        rows = load_dataset(match["name"], match["config"], split=match["split"] or "train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield _Row(f"{source}, row {number}", row)
    except Exception as error:  # whatever the network, the hub and the readers of a dozen file types raise
        raise InputError(
            f"{source} cannot be loaded: {_first_line(error)}; check the name and the network, or give a local .txt "
            "or .jsonl"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
