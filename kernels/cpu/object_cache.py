"""Compiled kernels in the user's cache folder, so that a second start compiles nothing.

A file is named after everything that its machine code depends on: the kernel in LLVM's language, the processor, and the
version of llvmlite. It begins with the hash of what follows, so a damaged one is not used. Where nothing can be
written, kernels are compiled each time.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import llvmlite

from quantkit.kernels.cpu.processor import Processor

_HASH = 32  # bytes


def cache_folder() -> Path:
    return Path.home() / ".cache" / "quantkit" / "cpu-kernels"


def file_of(text: str, processor: Processor) -> Path:
    known = "\n".join([llvmlite.__version__, repr(processor), text])
    return cache_folder() / f"{sha256(known.encode()).hexdigest()}.o"


def read(file: Path) -> bytes | None:
    """Machine code as it was written; None where there is none, or no longer."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    return data[_HASH:] if sha256(data[_HASH:]).digest() == data[:_HASH] else None


def write(file: Path, code: bytes) -> None:
    """Under its name when it is complete: others may read it at the same time."""
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(sha256(code).digest() + code)
        beside.replace(file)
    except OSError:
        with suppress(OSError):
            beside.unlink()
