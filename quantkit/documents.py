"""Collections of documents as tokens: a .jsonl file, a dataset of the hub, or a folder of text files such as code.

Documents are tokenized one by one and packed end to end. A plain text is closed by the end-of-text token; a chat goes
through the model's own template, which has put in its own.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import reprlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quantkit.errors import InputError, StorageError
from quantkit.extras import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB = "datasets:"
_HUB_SOURCE = re.compile(r"datasets:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^:@]+))?(?:@(?P<split>[^:@]+))?")
_BATCH = 16  # documents tokenized at once, in parallel; also the most that are read from a stream in vain
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell half a character, no tokenizer takes it
_KEYS = "'text' or 'messages'"
_BINARY_SHOWS = 8192  # bytes of a file, in which a NUL says that it is no text


class Row(NamedTuple):
    """One object of a collection, as it was read, and where it stands, for errors."""

    where: str
    value: object


class _Document(NamedTuple):
    text: str
    plain: bool


def is_collection(source: str) -> bool:
    """Whether a source holds documents; otherwise it is one text, or nothing."""
    return source.startswith(HUB) or source.lower().endswith(".jsonl") or Path(source).is_dir()


def document_ids(tokenizer: PreTrainedTokenizerBase, source: str, enough: int | None = None, seed: int = 0) -> Tensor:
    """Token ids [tokens] of a collection; reads on only until there are `enough`. `seed` orders a folder's files."""
    if source.startswith(HUB):
        rows = hub_rows(source)
    elif Path(source).is_dir():
        rows = _folder_rows(Path(source), seed)
    else:
        rows = _jsonl_rows(Path(source))
    return _packed(tokenizer, _documents(tokenizer, rows), enough)


def _packed(tokenizer: PreTrainedTokenizerBase, documents: Iterator[_Document], enough: int | None) -> Tensor:
    """Documents end to end, [tokens]."""
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


def _documents(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Row]) -> Iterator[_Document]:
    """The texts of rows, chats as the model's own template writes them; empty texts are left out."""
    for where, row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{where}: {reprlib.repr(row)} is not an object with {_KEYS}")
        if "text" in row:
            document = _Document(row["text"], plain=True)
        elif "messages" in row:
            document = _Document(_chat(tokenizer, where, row["messages"], row.get("tools")), plain=False)
        else:
            raise InputError(f"{where}: the keys are {', '.join(map(str, row)) or 'none'}; one of them must be {_KEYS}")
        if not isinstance(document.text, str):
            raise InputError(f"{where}: 'text' is {reprlib.repr(document.text)}, but must be text")
        if _SURROGATE.search(document.text):
            raise InputError(f"{where}: holds half a character (a lone surrogate); write it whole")
        if document.text:
            yield document


def _chat(tokenizer: PreTrainedTokenizerBase, where: str, messages: object, tools: object) -> str:
    """A conversation as text, with the tools that were offered in it."""
    from jinja2 import TemplateError

    if not messages or not _objects(messages):
        raise InputError(
            f"{where}: 'messages' is {reprlib.repr(messages)}, but must be a list of objects with role and content"
        )
    if tools is not None and not _objects(tools):
        raise InputError(f"{where}: 'tools' is {reprlib.repr(tools)}, but must be a list of objects as requests have")
    if not tokenizer.chat_template:
        raise InputError(f"{where}: 'messages' need a chat template and this model's tokenizer has none; give 'text'")
    given: Any = {"conversation": messages, "tools": tools or None}
    try:
        return str(tokenizer.apply_chat_template(**given, tokenize=False))
    except (TemplateError, TypeError, ValueError) as error:  # what templates raise, by intent or over a missing key
        raise InputError(f"{where}: the model's chat template refuses these messages: {_first_line(error)}") from error


def _objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _jsonl_rows(file: Path) -> Iterator[Row]:
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _json_row(f"{file}, line {number}", line)
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {file}: {error}") from error


def _json_row(where: str, line: str) -> Row:
    try:
        return Row(where, json.loads(line))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}); every line must be one object with {_KEYS}") from error


def _folder_rows(folder: Path, seed: int) -> Iterator[Row]:
    """Every UTF-8 text in a folder and those inside it, in an order drawn by the seed; no hidden ones, no links."""
    files = sorted(_visible_files(folder))
    for place in torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist():
        text = _text_of(files[place])
        if text is not None:
            yield Row(str(files[place]), {"text": text})


def _visible_files(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise StorageError(f"cannot read the folder {folder}: {error}") from error

    for here, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = (Path(here, name) for name in names if not name.startswith("."))
        yield from (file for file in files if file.is_file() and not file.is_symlink())


def _text_of(file: Path) -> str | None:
    """None where it is no text."""
    try:
        with file.open("rb") as stream:
            head = stream.read(_BINARY_SHOWS)
            return None if b"\0" in head else (head + stream.read()).decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error}") from error


def hub_rows(source: str) -> Iterator[Row]:
    """The rows of a dataset in their own order, streamed. Runs no code of the dataset."""
    match = _HUB_SOURCE.fullmatch(source)
    if match is None:
        raise InputError(f"'{source}' is not of the form {HUB}ORG/NAME, {HUB}ORG/NAME:CONFIG or ...@SPLIT")
    require(source, "calibration")
    from datasets import load_dataset

    try:
        rows = load_dataset(match["name"], match["config"], split=match["split"] or "train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield Row(f"{source}, row {number}", row)
    except Exception as error:  # whatever the network, the hub and the readers of a dozen file types raise
        raise InputError(
            f"{source} cannot be loaded: {_first_line(error)}; check the name and the network, or give a local .txt "
            "or .jsonl"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
