"""Opening a GGUF file: metadata with checked types, and tensors that stay in the file until they are asked for.

The `gguf` package does the parsing. This module adds what a user of a broken file needs: one clear line instead of an
IndexError, and no endless loop over a length field that was cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

from quantkit.errors import InputError, StorageError

T = TypeVar("T", int, str, bool, list[Any])
V = TypeVar("V")
_BROKEN = (ValueError, KeyError, IndexError, EOFError, OverflowError, TypeError, RecursionError)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file that was opened and found whole. Its tensors are views into the file, not copies in memory."""

    path: Path
    fields: Mapping[str, Any]  # gguf.ReaderField by key
    tensors: Mapping[str, Any]  # gguf.ReaderTensor by name

    @property
    def architecture(self) -> str:
        return self.need("general.architecture", str)

    def find(self, key: str, kind: type[T]) -> T | None:
        """The value under a metadata key, or None where the file is silent."""
        value = self._contents(key)
        if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return value
        raise InputError(f"{self.path}: metadata '{key}' is a {type(value).__name__}, expected {kind.__name__}")

    def number(self, key: str) -> float | None:
        """A float32 as the short number that was meant: 1e-05, not 9.999999747378752e-06. Or None."""
        value = self._contents(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{self.path}: metadata '{key}' is a {type(value).__name__}, expected a number")
        return float(str(np.float32(value)))

    def need(self, key: str, kind: type[T]) -> T:
        """The value under a metadata key that must be there."""
        return self._there(key, self.find(key, kind))

    def need_number(self, key: str) -> float:
        return self._there(key, self.number(key))

    def _there(self, key: str, value: V | None) -> V:
        if value is None:
            raise InputError(f"{self.path} lacks the metadata '{key}'; convert the model to GGUF again")
        return value

    def _contents(self, key: str) -> Any:
        try:
            return self.fields[key].contents() if key in self.fields else None
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path}: metadata '{key}' is not UTF-8 text; get the file again") from error

    def is_list(self, key: str) -> bool:
        return key in self.fields and len(self.fields[key].types) > 1

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape in torch's order; GGUF lists the innermost dimension first."""
        if name not in self.tensors:
            raise InputError(f"{self.path} lacks tensor {name}; the file is incomplete, get it again")
        return tuple(int(size) for size in reversed(self.tensors[name].shape))


def open_gguf(path: str | Path) -> GgufFile:
    """Opens a file and checks that everything its header promises lies inside it."""
    file = Path(path)
    _check_start(file)
    try:
        reader = _BoundedReader(file)
    except _BROKEN as error:
        raise StorageError(f"{file} is truncated or damaged ({_plain(error)}); get the file again") from error
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error}") from error
    if reader.byte_order == "S":
        raise InputError(
            f"{file} was written for the other byte order; convert the model to GGUF again on this machine"
        )
    opened = GgufFile(file, reader.fields, {tensor.name: tensor for tensor in reader.tensors})
    parts = opened.find("split.count", int) or 1
    if parts > 1:
        raise InputError(f"{file} is one of {parts} parts; join them first: llama-gguf-split --merge PART-1 WHOLE.gguf")
    return opened


def _check_start(file: Path) -> None:
    """Refuses what is no GGUF file at all."""
    if file.is_dir():
        raise StorageError(f"{file} is a folder; give the .gguf file inside it")
    try:
        with file.open("rb") as opened:
            start = opened.read(24)
    except FileNotFoundError as error:
        raise StorageError(f"{file} does not exist; give the path of a .gguf file") from error
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error}") from error
    if start[:4] != b"GGUF":
        raise InputError(f"{file} is not a GGUF file: it starts with {start[:4]!r}, not b'GGUF'")
    if len(start) < 24:
        raise StorageError(f"{file} is truncated or damaged (it ends after {len(start)} bytes); get the file again")
    version = int.from_bytes(start[4:8], "little")
    if version & 0xFFFF and version not in READER_SUPPORTED_VERSIONS:  # else of the other byte order
        raise InputError(
            f"{file} is of GGUF version {version}, but versions {' and '.join(map(str, READER_SUPPORTED_VERSIONS))} "
            "are read; convert the model to GGUF again"
        )


class _BoundedReader(GGUFReader):  # type: ignore[misc]  # gguf carries no types
    """The package's reader, which reads past the end as empty arrays, made to stop there."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        values = super()._get(offset, dtype, count, override_order)
        if len(values) < int(count):
            raise EOFError(f"it ends at byte {len(self.data)}, but its header promises more")
        return values

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        known = {int(kind) for kind in GGMLQuantizationType}
        for field in fields:
            kind = int(field.parts[4][0])  # parts: name length, name, dimensions, shape, type, offset
            if kind not in known:
                raise InputError(
                    f"tensor {field.name} has ggml type number {kind}, which the installed gguf package does not know; "
                    "upgrade it with 'pip install -U gguf'"
                )
            row, (block, _) = int(field.parts[3][0]), GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            if row % block:
                raise InputError(
                    f"rows of tensor {field.name} have {row} numbers, which is no whole number of "
                    f"{GGMLQuantizationType(kind).name} blocks of {block}; convert the model to GGUF again"
                )
        super()._build_tensors(start_offs, fields)


def _plain(error: Exception) -> str:
    """The message of an error without its quotes and line breaks."""
    return " ".join(str(error).split()).strip("'\"") or type(error).__name__
