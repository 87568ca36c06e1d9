"""What the server reads from files before it starts: its settings (YAML) and its API keys."""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from quantkit.errors import InputError, StorageError
from quantkit.strict_yaml import StrictLoader

KEYS_VARIABLE = "QUANTKIT_API_KEYS"  # keys from the environment, separated by commas or new lines
SHORTEST_KEY = 16
_LARGEST_FILE = 1 << 20  # bytes; no configuration is that long
_NAME = re.compile(r"[\w.@-]{1,64}")
_KEY = re.compile(r"[!-~]+")  # what an HTTP header carries without quoting
_COMMENT = re.compile(r"(?:^|\s)#")  # a key may hold a # itself
_OTHERS = stat.S_IRWXO | stat.S_IWGRP  # who must not touch a file of keys


@dataclass(frozen=True)
class ApiKey:
    """A key that may ask. Only its digest is kept, so no log, no repr and no crash report can show it."""

    name: str
    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, name: str, key: str) -> ApiKey:
        return cls(name, hashlib.sha256(key.encode()).digest())


def matching_key(given: str, known: Iterable[ApiKey]) -> str | None:
    """The name of the key that was given; None for one that is not known. Takes the same time for every wrong key."""
    digest = hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest()
    found = None
    for key in known:
        if hmac.compare_digest(digest, key.digest):
            found = key.name
    return found


def read_config(path: str | Path) -> dict[str, Any]:
    """The keys and values of a configuration file. Keys may be written as their flags, `max-queue` for `max_queue`."""
    try:
        found = yaml.load(_read(Path(path)), StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InputError(f"{path}: {line}not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InputError(f"{path}: must hold `key: value` lines, such as `port: 8000`")
    named = {str(key).replace("-", "_"): value for key, value in found.items()}
    if len(named) < len(found):
        raise InputError(f"{path}: a key is given twice, once with - and once with _")
    return named


def read_api_keys(path: str | Path) -> tuple[ApiKey, ...]:
    """The keys of a file, one `name: key` or `key` a line; # begins a comment."""
    file = Path(path)
    text = _read(file)
    if file.stat().st_mode & _OTHERS:
        raise InputError(f"{path}: other users can reach the API keys in this file; run: chmod 600 {path}")
    return _parsed_keys(enumerate(text.splitlines(), start=1), where=f"{path}: line ")


def read_watermark_key(path: str | Path) -> str:
    """The secret of a watermark: what a file holds, but for space around it."""
    file = Path(path)
    key = _read(file).strip()
    if file.stat().st_mode & _OTHERS:
        raise InputError(f"{path}: other users can reach the watermark key in this file; run: chmod 600 {path}")
    if len(key) < SHORTEST_KEY:
        raise InputError(
            f"{path}: the watermark key has {len(key)} characters, but needs {SHORTEST_KEY}; make one with: "
            f"openssl rand -hex 32 > {path}"
        )
    return key


def parse_api_keys(text: str) -> tuple[ApiKey, ...]:
    """The keys of the environment variable, separated by commas or new lines."""
    return _parsed_keys(enumerate(re.split(r"[,\n]", text), start=1), where=f"{KEYS_VARIABLE}: entry ")


def _parsed_keys(lines: Iterable[tuple[int, str]], where: str) -> tuple[ApiKey, ...]:
    """Errors name the line, never its contents."""
    keys: list[ApiKey] = []
    for number, line in lines:
        entry = _COMMENT.split(line, maxsplit=1)[0].strip()
        if not entry:
            continue
        first, colon, rest = entry.partition(":")
        name, key = (first.strip(), rest.strip()) if colon else (f"key-{len(keys) + 1}", entry)
        wrong = _fault(name, key, keys)
        if wrong:
            raise InputError(f"{where}{number}: {wrong}")
        keys.append(ApiKey.of(name, key))
    if not keys:
        raise InputError(f"{where.partition(': ')[0]}: no API key; write one `name: key` a line")
    return tuple(keys)


def _fault(name: str, key: str, before: list[ApiKey]) -> str:
    """What is wrong with a key; nothing for a good one."""
    if not _NAME.fullmatch(name):
        return "the name before the colon must be letters, digits, '.', '_', '-' or '@', at most 64"
    if not _KEY.fullmatch(key):
        return "a key must be printable ASCII without spaces; make one with: openssl rand -hex 32"
    if len(key) < SHORTEST_KEY:
        return f"the key has {len(key)} characters, but needs {SHORTEST_KEY}; make one with: openssl rand -hex 32"
    if any(name == other.name for other in before):
        return f"the name '{name}' is given twice"
    if matching_key(key, before):
        return f"the same key as that of '{matching_key(key, before)}'"
    return ""


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            found = opened.read(_LARGEST_FILE + 1)
        if len(found) > _LARGEST_FILE:
            raise StorageError(f"{file}: larger than {_LARGEST_FILE} bytes; is this the right file?")
        return found.decode("utf-8")
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise StorageError(f"{file}: not UTF-8 text: {error.reason}") from error
