"""Files that appear whole or not at all, and folders that one process has at a time."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.errors import InputError, StorageError
from quantkit.storage import FolderLock, replacing, storage_errors


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "note"
    with replacing(file) as partial:
        partial.write_text("old")

    def fail() -> None:
        with replacing(file) as partial:
            partial.write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=r"^no space left for .*; buy a disk$"),
        storage_errors(tmp_path, "buy a disk"),
    ):
        raise OSError(errno.EDQUOT, "quota")
    with pytest.raises(StorageError, match=r"cannot write in .*choose a folder"), storage_errors(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_a_locked_folder_is_refused_until_it_is_free(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "deep" / "work", "somebody works here")
    with pytest.raises(InputError, match=r"somebody works here: process \d+; wait"):
        FolderLock(tmp_path / "deep" / "work", "somebody works here")
    lock.release()
    assert not lock.held
    again = FolderLock(tmp_path / "deep" / "work", "somebody works here")
    again.remove_folder()
    assert not again.held
    assert list((tmp_path / "deep").iterdir()) == []


CONTEST = """
import os, sys
from pathlib import Path
from quantkit.errors import InputError
from quantkit.storage import FolderLock

folder, witness, won = Path(sys.argv[1]), Path(sys.argv[2]), 0
for turn in range(3000):
    try:
        lock = FolderLock(folder, "busy")
    except InputError:
        continue
    os.close(os.open(witness, os.O_CREAT | os.O_EXCL))  # fails when two are inside
    won += 1
    witness.unlink()
    (lock.remove_folder if turn % 2 else lock.release)()
print(won)
"""


def test_never_two_inside_while_the_folder_comes_and_goes(tmp_path: Path) -> None:
    args = [sys.executable, "-c", CONTEST, str(tmp_path / "work"), str(tmp_path / "witness")]
    running = [subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    results = [(*process.communicate(), process.returncode) for process in running]
    for out, err, code in results:
        assert code == 0, err
        assert int(out) > 0
