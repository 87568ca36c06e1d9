"""Writing checkpoints: shards stream into a hidden folder that takes its final name only when complete.

    with CheckpointWriter(output) as writer:
        writer.add("model.norm.weight", tensor)
        writer.add_json("config.json", config)
        writer.finish()

Before the folder gets its name, every tensor is read back and compared with what was handed over. Leaving the block
without `finish`, or with an error, removes everything written so far. A process that is killed leaves `.NAME.partial`
behind, never a folder that looks finished.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from quantkit.checkpoint import INDEX, read_all, stored_tensors
from quantkit.checksums import checksum
from quantkit.defaults import SHARD_BYTES
from quantkit.errors import InputError, QuantkitError, StorageError
from quantkit.storage import NOTHING_KEPT, FolderLock, storage_errors, sync


class CheckpointWriter:
    """Collects tensors into shards of at most `shard_bytes` and the files beside them."""

    def __init__(
        self,
        output: str | Path,
        *,
        overwrite: bool = False,
        shard_bytes: int = SHARD_BYTES,
        expected_bytes: int = 0,
        when_full: str = NOTHING_KEPT,
    ) -> None:
        """`when_full` ends the message about a full disk: what is kept, and what to do."""
        self.output = Path(output).absolute()
        self.partial = self.output.with_name(f".{self.output.name}.partial")
        self._locked = self.output.with_name(f".{self.output.name}.writing")
        self._lock: FolderLock | None = None
        self._overwrite = overwrite
        self._shard_bytes = shard_bytes
        self._when_full = when_full
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._checksums: dict[str, str] = {}  # of all tensors handed over
        self.total_bytes = 0
        check_output(self.output, overwrite)
        check_space(self.output, expected_bytes)

    def __enter__(self) -> CheckpointWriter:
        with self._storage_errors():
            self._lock = FolderLock(self._locked, f"{self.output} is being written")
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        if self._lock is not None:
            self._lock.remove_folder()

    def add(self, name: str, tensor: Tensor, checksum_when_made: str | None = None) -> None:
        """Takes one tensor; writes a shard when enough have come together.

        A tensor that was on disk since it was made comes with its checksum of then, which the written one must have.
        """
        tensor = tensor.detach().contiguous()
        self._checksums[name] = checksum_when_made or checksum(tensor)
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += size
        self.total_bytes += size

    def add_json(self, name: str, value: dict[str, Any]) -> None:
        self.add_text(name, json.dumps(value, indent=2) + "\n")

    def add_text(self, name: str, text: str) -> None:
        with self._storage_errors():
            (self.partial / name).write_text(text, encoding="utf-8")

    def add_file(self, source: Path) -> None:
        with self._storage_errors():
            shutil.copyfile(source, self.partial / source.name)

    def finish(self, verify: Callable[[Path], None] = lambda folder: None) -> None:
        """Writes what is pending and the index, reads all tensors back and lets `verify` read the result, then gives it
        its final name."""
        self._flush()
        with self._storage_errors():
            self._name_shards()
        self._compare()
        verify(self.partial)
        with self._storage_errors():
            for path in (*self.partial.iterdir(), self.partial):
                sync(path)  # all of it is on disk before the folder gets its final name
            _replace(self.partial, self.output, self._overwrite)

    def _flush(self) -> None:
        if not self._pending:
            return
        with self._storage_errors():
            file = self.partial / f"shard-{len(self._shards):05d}.safetensors"
            file.touch()
            usual_mode = file.stat().st_mode
            save_file(self._pending, file, metadata={"format": "pt"})
            file.chmod(usual_mode)  # safetensors makes files that only their owner may read
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _name_shards(self) -> None:
        count = len(self._shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for index, name in enumerate(names):
            (self.partial / f"shard-{index:05d}.safetensors").rename(self.partial / name)
        if count > 1:
            weight_map = {tensor: name for name, shard in zip(names, self._shards, strict=True) for tensor in shard}
            self.add_json(INDEX, {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map})

    def _compare(self) -> None:
        """Every tensor, found as any reader finds it, with what was handed over."""
        stored = stored_tensors(self.partial)
        for names, said in (
            (self._checksums.keys() - stored.keys(), "is missing in what was written"),
            (stored.keys() - self._checksums.keys(), "stands in what was written, but nobody wrote it"),
        ):
            if names:
                raise QuantkitError(f"{min(names)} {said}; disk or memory is faulty")
        for name, tensor in read_all(stored):
            if checksum(tensor) != self._checksums[name]:
                raise QuantkitError(
                    f"{name} read back from disk differs from what was written; disk or memory is faulty"
                )

    def _storage_errors(self) -> AbstractContextManager[None]:
        return storage_errors(self.partial, self._when_full)


def check_space(output: Path, needed: int) -> None:
    """Refuses to begin what the disk has no room for."""
    free = free_space(output)
    if needed > free:
        raise StorageError(
            f"{output} needs about {needed / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free there; "
            "free some space or choose another output folder"
        )


def free_space(output: Path) -> int:
    """Bytes on the disk that an output folder, and folders above it that are missing, would be made on."""
    parent = output.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return shutil.disk_usage(parent).free


def check_output(output: Path, overwrite: bool) -> None:
    """Refuses an output path that exists, unless it is a checkpoint that may be overwritten."""
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError(f"output {output} exists and is not a folder; choose another name")
    if not overwrite:
        raise InputError(f"output folder {output} exists; choose another name or pass --overwrite")
    if any(output.iterdir()) and not (output / "config.json").exists():
        raise InputError(
            f"output folder {output} is not a checkpoint, so it will not be overwritten; choose another name"
        )


def _replace(partial: Path, output: Path, overwrite: bool) -> None:
    check_output(output, overwrite)  # somebody may have made it meanwhile
    old = output.with_name(f".{output.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if output.exists():
        output.rename(old)
    partial.rename(output)
    sync(output.parent)
    shutil.rmtree(old, ignore_errors=True)
