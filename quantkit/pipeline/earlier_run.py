"""What an earlier run left in the journal's folder, and whether the next one may go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.pipeline.differences import differences
from quantkit.pipeline.sealing import as_read_back, digest, matches, read_json
from quantkit.storage import FolderLock, storage_errors

ARGUMENTS = "arguments.json"
_NAMED_DIFFERENCES = 4


def check_journal(output: str | Path, arguments: Mapping[str, Any], *, restart: bool = False) -> None:
    """Refuses what opening a journal would refuse: a folder that cannot be made, another process, another run.

    It takes the folder for a moment, as a run would, and leaves everything as it was.
    """
    folder = journal_folder(output)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        lock = lock_journal(output)
        try:
            if not restart:
                finished_units(folder, as_read_back(arguments))
        finally:
            if made:
                lock.remove_folder()
            lock.release()
    finally:
        for path in made:
            with suppress(OSError):  # never made, or no longer empty: somebody else's by now
                path.rmdir()


def journal_folder(output: str | Path) -> Path:
    output = Path(output).absolute()
    return output.with_name(f".{output.name}.journal")


def lock_journal(output: str | Path) -> FolderLock:
    folder = journal_folder(output)
    with storage_errors(folder):
        return FolderLock(folder, f"another process is writing {Path(output).absolute()}")


def finished_units(folder: Path, arguments: dict[str, Any]) -> tuple[int, bool]:
    """How many units an earlier run finished, and whether its arguments were these; refuses those of another run."""
    earlier = read_json(folder / ARGUMENTS)
    same = earlier is not None and digest(earlier) == digest(arguments)
    owner, finished = digest(arguments if earlier is None else earlier), 0
    while _is_whole(*unit_files(folder, finished), owner):
        finished += 1
    if finished and owner != digest(arguments):
        raise _other_run(folder, finished, differences(earlier or {}, arguments))
    return finished, same


def unit_files(folder: Path, index: int) -> tuple[Path, Path]:
    return folder / f"unit-{index:05d}.safetensors", folder / f"unit-{index:05d}.json"


def _other_run(folder: Path, finished: int, changes: list[str]) -> InputError:
    more = len(changes) - _NAMED_DIFFERENCES
    named = "; ".join(changes[:_NAMED_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
    return InputError(
        f"{folder} holds {finished_blocks(finished)} of another run: {named}; "
        "run the old command to go on with it, or pass --restart to throw the old work away"
    )


def _is_whole(weights: Path, description: Path, owner: str) -> bool:
    """Whether both files of a unit are exactly what was committed under these arguments."""
    value = read_json(description) or {}
    unit = value.get("unit")
    if not isinstance(unit, dict) or value.get("sha256") != digest(unit) or unit["arguments"] != owner:
        return False
    if not isinstance(unit["tensors"], dict):  # from before tensors had checksums of their own
        return False
    return matches(weights, unit["weights"])


def finished_blocks(number: int) -> str:
    return f"{number} finished {'block' if number == 1 else 'blocks'}"
