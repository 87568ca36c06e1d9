"""What a folder that was made from a GGUF file says of that file.

    gguf_import.json    its name and its tensors' types
    gguf_tensors.json   where every weight of the model lies in it, for a folder without weights of its own: a view

A view lists a tensor by its name in the model: where its first byte is, its ggml type, its shape in the model. Rows of
llama's queries and keys are brought back into their order when they are read, which moves whole rows of blocks and
changes none. `gguf_import/folder.py` writes views; whoever reads one needs no GGUF parser.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.errors import StorageError
from quantkit.extras import require
from quantkit.formats import Gguf, TensorInfo
from quantkit.formats.gguf import TYPES

IMPORT_RECORD = "gguf_import.json"
MANIFEST = "gguf_tensors.json"
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DECODED = "BF16"  # what types without a kernel become


def import_record(file: str | Path, tensor_types: dict[str, int]) -> dict[str, Any]:
    """What a folder says of its origin; the name alone, no path of this machine."""
    return {"file": Path(file).name, "tensor_types": tensor_types}


@dataclass(frozen=True)
class FileStamp:
    """A file as it was when a view of it was made."""

    path: str
    size: int
    modified: int  # nanoseconds

    @classmethod
    def of(cls, file: Path) -> FileStamp:
        found = file.stat()
        return cls(str(file.resolve()), found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor of a model lies in a file."""

    at: int  # of its first byte
    kind: str  # its ggml type
    shape: tuple[int, ...]  # in the model
    row_bytes: int
    heads: int = 0  # whose rows lie in ggml's rotary order; 0: rows are in their own
    minus: float = 0.0  # to be taken from every number

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def in_blocks(self) -> bool:
        """Whether its blocks are kept as they are."""
        return self.kind in TYPES and len(self.shape) == 2 and not self.minus

    @property
    def info(self) -> TensorInfo:
        """As a checkpoint lists it."""
        if self.in_blocks:
            return TensorInfo("U8", (self.shape[0], self.row_bytes))
        return TensorInfo(self.kind if self.kind in PLAIN else _DECODED, self.shape)


class TypeCount(NamedTuple):
    """What a model has of one ggml type."""

    tensors: int
    weights: int
    bits_per_weight: float

    @classmethod
    def of(cls, places: Sequence[TensorPlace]) -> TypeCount:
        weights = sum(math.prod(place.shape) for place in places)
        bits = 8 * sum(place.rows * place.row_bytes for place in places)
        return cls(len(places), weights, bits / max(weights, 1))


@dataclass(frozen=True)
class GgufView:
    """The tensors of a model in a GGUF file, by their names in the model."""

    stamp: FileStamp
    places: Mapping[str, TensorPlace]

    @property
    def file(self) -> Path:
        return Path(self.stamp.path)

    @property
    def formats(self) -> dict[str, Gguf]:
        """Of every module whose weight is in blocks."""
        blocks = {name: place.kind for name, place in self.places.items() if place.in_blocks}
        return {name.removesuffix(".weight"): Gguf(kind) for name, kind in blocks.items()}

    @property
    def types(self) -> dict[str, TypeCount]:
        """The types of the model's tensors, most weights first."""
        found: dict[str, list[TensorPlace]] = {}
        for place in self.places.values():
            found.setdefault(place.kind, []).append(place)
        counts = {kind: TypeCount.of(places) for kind, places in found.items()}
        return dict(sorted(counts.items(), key=lambda item: -item[1].weights))

    @property
    def decoded(self) -> str:
        """For people: what has no kernel; empty where everything has one."""
        without = [kind for kind in self.types if kind not in PLAIN and kind not in TYPES]
        if not without:
            return ""
        listed = ", ".join(f"{self.types[kind].tensors} of {kind}" for kind in without)
        return f"{self.file.name}: tensors of types without a kernel are decoded to 16 bits: {listed}"

    def tensor(self, name: str) -> Tensor:
        """One tensor as `TensorPlace.info` says; where nothing is moved or decoded, a view of the mapped file."""
        place = self.places[name]
        held = self._bytes[place.at : place.at + place.rows * place.row_bytes].view(place.rows, place.row_bytes)
        if not place.in_blocks:
            held = _numbers(held, place)
        return own_row_order(held, place.heads) if place.heads else held

    def let_go(self) -> None:
        """What was read of the mapped file counts as memory no more; it is read again where it is needed again."""
        if "_mapped" in self.__dict__ and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def _bytes(self) -> Tensor:
        return torch.frombuffer(self._mapped, dtype=torch.uint8)

    @cached_property
    def _mapped(self) -> mmap.mmap:
        try:
            now = FileStamp.of(self.file)
            with self.file.open("rb") as opened:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants to be able to write
        except OSError as error:
            raise StorageError(f"{self.file} cannot be read: {error}") from error
        if now != self.stamp:
            raise StorageError(f"{self.file} changed while it was in use; start again")
        return mapped

    def write(self, folder: Path) -> None:
        places = {name: asdict(place) for name, place in self.places.items()}
        text = json.dumps({"stamp": asdict(self.stamp), "tensors": places})
        (folder / MANIFEST).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> GgufView | None:
        """None where the folder has weights of its own."""
        file = folder / MANIFEST
        if not file.exists():
            return None
        try:
            held = json.loads(file.read_text(encoding="utf-8"))
            places = {
                name: TensorPlace(**{**place, "shape": tuple(place["shape"])})
                for name, place in held["tensors"].items()
            }
            return cls(FileStamp(**held["stamp"]), places)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"{file} cannot be read ({error}); delete {folder} and start again") from error


def own_row_order(weight: Tensor, heads: int) -> Tensor:
    """Undoes ggml's rotary order, in which the two halves of each head of llama's q and k alternate row by row."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])  # [heads, dim / 2, 2, in]
    return pairs.transpose(1, 2).reshape(weight.shape)


def _numbers(held: Tensor, place: TensorPlace) -> Tensor:
    """uint8 [rows, bytes] as the numbers that they stand for."""
    if place.kind in PLAIN:
        numbers = held.view(PLAIN[place.kind])
    elif place.kind in TYPES:
        numbers = Gguf(place.kind).decode({"weight": held}, PLAIN[_DECODED])
    else:
        require(f"a GGUF tensor of type {place.kind}", "gguf")
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        decoded = dequantize(held.numpy(), GGMLQuantizationType[place.kind])
        numbers = torch.from_numpy(decoded).to(PLAIN[_DECODED])
    return (numbers - place.minus if place.minus else numbers).reshape(place.shape)
