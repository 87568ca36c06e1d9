"""Writing safely: failures as one line, files that appear whole or not at all, folders for one process at a time."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from quantkit.errors import InputError, StorageError

try:
    import fcntl
except ImportError:  # Windows: nothing keeps a second process out
    fcntl = None  # type: ignore[assignment]

NOTHING_KEPT = "nothing was kept, free some space and run again"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_OFFERED = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some network file systems lock nothing


@contextmanager
def storage_errors(where: Path, when_full: str = NOTHING_KEPT) -> Iterator[None]:
    """Turns failures of the file system into one clear line; `when_full` says what a full disk left and what to do."""
    try:
        yield
    except OSError as error:
        raise _explained(where, when_full, error.errno in _DISK_FULL, error) from error
    except SafetensorError as error:  # carries the system's message as text
        full = any(f"os error {code}" in str(error) for code in _DISK_FULL)
        raise _explained(where, when_full, full, error) from error


def _explained(where: Path, when_full: str, disk_full: bool, error: Exception) -> StorageError:
    if disk_full:
        return StorageError(f"no space left for {where.parent}; {when_full}")
    return StorageError(f"cannot write in {where.parent}: {error}; choose a folder you may write to")


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Gives a name to write to; afterwards `file` is complete and on disk, or what it was before."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        yield partial
        sync(partial)
        partial.replace(file)
        sync(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Asks the system to put a file's content, or a folder's names, on disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
    finally:
        os.close(descriptor)


class FolderLock:
    """A folder that belongs to this process until `release`, or until the process ends, however it ends."""

    NAME = "lock"

    def __init__(self, folder: Path, busy: str) -> None:
        """Makes the folder where it is missing. `busy` says what another process is doing with it."""
        self.folder = folder
        self._descriptor: int | None = None
        while self._descriptor is None:
            self._descriptor = _locked(folder / self.NAME, busy)
        with suppress(OSError):  # only a hint for the message that others get
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, str(os.getpid()).encode())

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def remove_folder(self) -> None:
        """Removes the folder with its files, the lock last, and releases it."""
        if fcntl is None:
            self.release()  # Windows removes no open files
        try:
            for file in sorted(self.folder.iterdir(), key=lambda file: file.name == self.NAME):
                file.unlink()
            self.folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # another process moved in as soon as the lock was gone
                raise
        finally:
            self.release()


def _locked(file: Path, busy: str) -> int | None:
    """The open and locked file in its folder, or None when another process removed them meanwhile."""
    try:
        _make_folder(file.parent)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return None
    try:
        _lock(descriptor)
        if os.path.samestat(os.fstat(descriptor), file.stat()):
            return descriptor
    except FileNotFoundError:
        pass
    except BlockingIOError as error:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
        os.close(descriptor)
        raise InputError(f"{busy}: process {holder}; wait until it is done, or choose another output") from error
    os.close(descriptor)
    return None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        if not stat.S_ISDIR(folder.lstat().st_mode):  # else it was there, gone, and is there again
            raise


def _lock(descriptor: int) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
