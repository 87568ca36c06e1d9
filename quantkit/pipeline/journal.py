"""What a run has finished so far, kept beside the output until the output is complete.

    with Journal(output, arguments) as journal:
        for index in range(journal.finished, count):
            journal.commit(tensors, record)
        ...                      # write the output from journal.tensors(i) and journal.record(i)
        journal.discard()

A run that was killed finds its finished units again when it is started with the same arguments. The folder
`.NAME.journal` holds

    arguments.json              everything that decides the result
    unit-00000.safetensors      the tensors of one unit
    unit-00000.json             its record, a checksum of every tensor, and what both files are recognised by
    state-00000.safetensors     what the next unit starts from; the last two are kept
    NAME.json                   notes: decisions made once, before the first unit
    lock                        held while a process works here

A unit counts when both files are whole and belong to these arguments; the JSON file is written last. Whatever is
damaged is done again, together with everything behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantkit.checkpoint import StoredTensor, read_headers
from quantkit.checksums import checksum
from quantkit.errors import InputError, StorageError
from quantkit.pipeline.earlier_run import (
    ARGUMENTS,
    finished_blocks,
    finished_units,
    journal_folder,
    lock_journal,
    unit_files,
)
from quantkit.pipeline.sealing import as_read_back, digest, matches, read_json, seal, unreadable, write_json
from quantkit.storage import NOTHING_KEPT, FolderLock, replacing, storage_errors, sync

_KEPT_STATES = 2  # damage at the end then costs the work since the one before, not everything


class Journal:
    """The finished units 0 .. n-1 of a run. Opening it takes the output for this process."""

    def __init__(self, output: str | Path, arguments: Mapping[str, Any], *, restart: bool = False) -> None:
        self.folder = journal_folder(output)
        self._arguments = as_read_back(arguments)
        self._digest = digest(self._arguments)
        self._finished = 0
        self._lock = lock_journal(output)
        try:
            self._open(restart)
        except BaseException:
            self._leave(failed=True)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hopeless = isinstance(error, InputError) and not isinstance(error, StorageError)
        if hopeless:  # the same command would fail in the same way
            self.discard()
        self._leave(failed=error is not None)

    @property
    def finished(self) -> int:
        """How many units are finished."""
        return self._finished

    @property
    def when_full(self) -> str:
        """What to tell the user when the disk is full."""
        if not self._finished:
            return NOTHING_KEPT
        return f"kept: {finished_blocks(self._finished)}; free some space and run the same command again to go on"

    def commit(
        self,
        tensors: Mapping[str, Tensor],
        record: Mapping[str, Any],
        state: Mapping[str, Tensor] | None = None,
        *,
        can_be_followed: bool = True,
    ) -> None:
        """Keeps the next unit. It is on disk when this returns; if this fails, it counts as not done.

        `state` is what the unit behind this one starts from. One that needs a state and has none (`can_be_followed`)
        is done again after a crash.
        """
        stored = _to_store(tensors)
        weights, description = self._files(self._finished)
        with self._storage_errors():
            if state:
                with replacing(self._state_file(self._finished)) as partial:
                    save_file(_to_store(state), partial)
            with replacing(weights) as partial:
                save_file(stored, partial)
            unit = {
                "arguments": self._digest,
                "tensors": {name: checksum(tensor) for name, tensor in stored.items()},
                "weights": seal(weights),
                "state": seal(self._state_file(self._finished)) if state else None,
                "can_be_followed": can_be_followed,
                "record": as_read_back(record),
            }
            write_json(description, {"sha256": digest(unit), "unit": unit})
            for outdated in self._states()[:-_KEPT_STATES]:
                outdated.unlink()
        self._finished += 1

    def record(self, index: int) -> dict[str, Any]:
        """The record of a finished unit, as JSON gives it back."""
        record: dict[str, Any] = self._unit(index)["record"]
        return record

    def tensors(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a finished unit, one by one, in the order in which they were committed."""
        weights, _ = self._files(index)
        names = self.checksums(index)
        try:
            with safe_open(weights, framework="pt") as opened:
                for name in names:
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise unreadable(weights, error) from error

    def stored(self, index: int) -> dict[str, StoredTensor]:
        """Where the tensors of a finished unit lie."""
        return dict(read_headers(self._files(index)[0]))

    def checksums(self, index: int) -> dict[str, str]:
        """Of the tensors of a finished unit, from before they were written."""
        checksums: dict[str, str] = self._unit(index)["tensors"]
        return checksums

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """What the next unit starts from, tensor by tensor, in the order of their names."""
        file = self._state_file(self._finished - 1)
        try:
            with safe_open(file, framework="pt") as opened:
                for name in sorted(opened.keys()):
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise unreadable(file, error) from error

    def note(self, name: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A decision made once: the one that an earlier run noted, or the one made now."""
        file = self.folder / f"{name}.json"
        noted = read_json(file)
        if noted is None:
            noted = as_read_back(decide())
            with self._storage_errors():
                write_json(file, noted)
        return noted

    def discard(self) -> None:
        """Removes the journal, once the output has its final name."""
        with suppress(OSError):  # the output is complete, whatever stays behind here
            self._clear()
            self._lock.remove_folder()

    def _open(self, restart: bool) -> None:
        """Finds the finished units, or starts anew."""
        finished, same = (0, False) if restart else finished_units(self.folder, self._arguments)
        while finished and not self._can_be_followed(finished - 1):
            finished -= 1
        with self._storage_errors():
            self._clear(finished, notes=same)
            self._finished = finished
            if not same:
                write_json(self.folder / ARGUMENTS, self._arguments)

    def _clear(self, kept: int = 0, *, notes: bool = False) -> None:
        """Removes all but the first units, from behind, so that what a kill leaves over is a journal again."""
        wanted = {file for index in range(kept) for file in self._files(index)}
        wanted |= {file for file in self._states() if file < self._state_file(kept)}
        wanted |= {self.folder / FolderLock.NAME, self.folder / ARGUMENTS}
        for file in sorted(self.folder.iterdir(), reverse=True):
            is_note = file.suffix == ".json" and not file.name.startswith("unit-")
            if file not in wanted and not (notes and is_note):
                file.unlink()
        sync(self.folder)

    def _can_be_followed(self, index: int) -> bool:
        """Whether the next unit has what it starts from, where it needs something."""
        unit = (read_json(self._files(index)[1]) or {})["unit"]
        seal = unit["state"]
        return bool(unit["can_be_followed"]) and (seal is None or matches(self._state_file(index), seal))

    def _leave(self, failed: bool) -> None:
        """Lets other processes in; a failed run that finished nothing takes its folder along."""
        if failed and self._lock.held and not any(self.folder.glob("unit-*.json")):
            with suppress(OSError):  # the error under way matters more
                self._lock.remove_folder()
        self._lock.release()

    def _files(self, index: int) -> tuple[Path, Path]:
        return unit_files(self.folder, index)

    def _state_file(self, index: int) -> Path:
        return self.folder / f"state-{index:05d}.safetensors"

    def _states(self) -> list[Path]:
        return sorted(self.folder.glob("state-*.safetensors"))

    def _unit(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._finished:
            raise IndexError(f"unit {index} of {self._finished}")
        _, description = self._files(index)
        value = read_json(description)
        if value is None:
            raise unreadable(description, "it was whole a moment ago")
        unit: dict[str, Any] = value["unit"]
        return unit

    def _storage_errors(self) -> AbstractContextManager[None]:
        return storage_errors(self.folder, self.when_full)


def _to_store(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and no two in the same memory: safetensors refuses those."""
    stored: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        plain = _on_cpu(tensor.detach()).contiguous()
        place = plain.untyped_storage().data_ptr()
        stored[name] = plain.clone() if place in memory else plain
        memory.add(place)
    return stored


def _on_cpu(tensor: Tensor) -> Tensor:
    """A GPU writes to pinned memory, which torch keeps for the next time, many times as fast."""
    if not tensor.is_cuda:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
