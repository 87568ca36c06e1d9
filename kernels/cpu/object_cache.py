"""Machine code of kernels, kept in the user's cache: what one process compiled, others load.

A file is named after all that decides its contents: the function of this folder that writes the kernel, with what it is
given; the files of this folder; the processor; the compiler's version. It begins with the checksum of the rest, so a
damaged one is made again. A folder that cannot be read or written costs the time to compile, nothing else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import llvmlite
from llvmlite import binding

from quantkit.kernels.cpu.processor import Processor

_CHECKSUM = hashlib.sha256().digest_size


def cache_folder() -> Path:
    return Path.home() / ".cache" / "quantkit" / "cpu-kernels"


def kept_object(name: str, body: Callable[..., None], processor: Processor, compile: Callable[[], bytes]) -> bytes:
    """The object file of a kernel; compiled where it is not there, or not whole."""
    written_by = _spoken(body)
    if written_by is None:
        return compile()
    versions = (llvmlite.__version__, str(binding.llvm_version_info))
    facts = (name, written_by, _sources(), repr(processor), *versions)
    try:
        file = cache_folder() / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.o"
    except RuntimeError:  # a user without a home
        return compile()
    with suppress(OSError):
        held = file.read_bytes()
        if hashlib.sha256(held[_CHECKSUM:]).digest() == held[:_CHECKSUM]:
            return held[_CHECKSUM:]
    made = compile()
    with suppress(OSError):
        _write(file, hashlib.sha256(made).digest() + made)
    return made


def _spoken(body: Callable[..., None]) -> str | None:
    """A function with the arguments that it has already; None where that does not say all: it stands elsewhere, inside
    another one, or has an argument that is told by its address."""
    given: dict[str, object] = {}
    while isinstance(body, partial):
        assert not body.args
        given, body = {**body.keywords, **given}, body.func
    name, package = f"{body.__module__}.{body.__qualname__}", __name__.rpartition(".")[0]
    spoken = f"{name} {sorted(given.items())}"
    return spoken if name.startswith(f"{package}.") and "<locals>" not in name and " at 0x" not in spoken else None


@cache
def _sources() -> str:
    """Of all kernels: who changes one makes all of them again."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _write(file: Path, contents: bytes) -> None:
    """Whole or not at all; nobody else may write what this user will run."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_bytes(contents)
    partial.replace(file)
