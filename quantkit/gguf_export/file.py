"""Writing a GGUF file: tensors stream into `NAME.partial`, are read back and compared, then the file gets its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from torch import Tensor

from quantkit.checkpoint_writer import check_space
from quantkit.checksums import checksum
from quantkit.errors import InputError, QuantkitError
from quantkit.gguf_import.reader import open_gguf
from quantkit.progress import Progress, silent
from quantkit.storage import FolderLock, replacing, storage_errors

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file. `make` gives its numbers [shape], or its packed rows as bytes [..., bytes]."""

    name: str
    shape: tuple[int, ...]  # in torch's order
    type: str  # of ggml, such as Q4_K
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        return int(prod(self.shape) // block * size)

    def stored(self) -> Tensor:
        """Its bytes [nbytes], as they stand in the file."""
        made = self.make()
        if self.type in PLAIN_TYPES:
            plain = made.to(PLAIN_TYPES[self.type])
            if not bool(torch.isfinite(plain).all()):
                raise InputError(f"tensor {self.name} has numbers that are too large for {self.type}, or no numbers")
            made = plain.contiguous().view(-1).view(torch.uint8)
        assert made.numel() == self.nbytes, f"{self.name}: not the bytes of {self.type}"
        return made.contiguous().view(-1)


def check_file(output: Path, overwrite: bool) -> None:
    """Refuses a name that is no GGUF file's, and one that is taken."""
    if output.suffix != ".gguf":
        raise InputError(f"output '{output}' must end in .gguf, since GGUF is one file; for example {output.name}.gguf")
    if output.is_dir():
        raise InputError(f"output {output} is a folder; choose another name")
    if output.exists() and not overwrite:
        raise InputError(f"output {output} exists; choose another name or pass --overwrite")


def write_gguf(
    output: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Sequence[FileTensor],
    *,
    overwrite: bool = False,
    on_tensor: Progress = silent,
    verify: Callable[[Path], None] = lambda file: None,
) -> int:
    """Writes the file, lets `verify` read it before it gets its name, and returns its bytes. One tensor is in memory
    at a time."""
    check_file(output, overwrite)
    check_space(output, sum(tensor.nbytes for tensor in tensors))
    with storage_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(output.with_name(f".{output.name}.writing"), f"{output} is being written")
    try:
        with storage_errors(output), replacing(output) as partial:
            sums = _write(partial, architecture, keys, tensors, on_tensor)
            _compare(partial, sums)
            verify(partial)
            check_file(output, overwrite)  # somebody may have made it meanwhile
        return output.stat().st_size
    finally:
        lock.remove_folder()


def _write(
    file: Path, architecture: str, keys: Mapping[str, Any], tensors: Sequence[FileTensor], on_tensor: Progress
) -> dict[str, str]:
    """The checksums of what was handed over, by name."""
    writer = GGUFWriter(file, architecture)
    for key, value in keys.items():
        _add(writer, key, value)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, GGMLQuantizationType[tensor.type]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    sums = {}
    try:
        for tensor in tensors:
            stored = tensor.stored()
            writer.write_tensor_data(stored.numpy())
            sums[tensor.name] = checksum(stored)
            on_tensor(tensor.name, len(tensors))
    finally:
        writer.close()
    return sums


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _compare(file: Path, sums: Mapping[str, str]) -> None:
    """Every tensor, found as any reader finds it, with what was handed over."""
    written = open_gguf(file).tensors
    if written.keys() != sums.keys():
        raise QuantkitError(f"{file} does not have the tensors that were written; disk or memory is faulty")
    for name, tensor in written.items():
        stored = torch.from_numpy(np.array(tensor.data).view(np.uint8).reshape(-1))
        if checksum(stored) != sums[name]:
            raise QuantkitError(f"{name} read back from disk differs from what was written; disk or memory is faulty")
