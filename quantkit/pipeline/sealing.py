"""Files that are trusted only while their checksums hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.errors import StorageError
from quantkit.storage import replacing

_PIECE, _THREADS = 8 << 20, 8  # bytes hashed by one thread at a time, and how many there are


def seal(file: Path) -> dict[str, Any]:
    """What a file is recognised by later. The hash is that of its pieces' hashes, so that threads can share it."""
    size = file.stat().st_size
    with ThreadPoolExecutor(_THREADS) as threads:
        pieces = threads.map(partial(_hash_piece, file), range(0, size, _PIECE))
    return {"bytes": size, "sha256_of_pieces": hashlib.sha256(b"".join(pieces)).hexdigest()}


def _hash_piece(file: Path, start: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(start)
        return hashlib.sha256(opened.read(_PIECE)).digest()


def matches(file: Path, sealed: dict[str, Any]) -> bool:
    """Whether a file is still what it was; its size is looked at first."""
    try:
        return bool(file.stat().st_size == sealed["bytes"] and seal(file) == sealed)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unreadable(file, error) from error


def write_json(file: Path, value: dict[str, Any]) -> None:
    with replacing(file) as unfinished:
        unfinished.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when there is no file or no object in it."""
    try:
        value = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as error:
        raise unreadable(file, error) from error
    return value if isinstance(value, dict) else None


def as_read_back(value: Mapping[str, Any]) -> dict[str, Any]:
    """JSON turns tuples into lists and keys into text."""
    back: dict[str, Any] = json.loads(json.dumps(value))
    return back


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def unreadable(file: Path, error: Exception | str) -> StorageError:
    return StorageError(
        f"{file} cannot be read ({error}); run the same command again, or pass --restart to do every block anew"
    )
