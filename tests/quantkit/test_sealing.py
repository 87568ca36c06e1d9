"""Checksums of files: any change shows, whichever piece it is in."""

from pathlib import Path

import pytest

from quantkit.errors import StorageError
from quantkit.pipeline import sealing


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sealing, "_PIECE", 1000)
    file = tmp_path / "file"
    file.write_bytes(bytes(number % 251 for number in range(4321)))
    return file


def test_an_unchanged_file_matches(file: Path) -> None:
    sealed = sealing.seal(file)
    assert sealed["bytes"] == 4321
    assert sealing.seal(file) == sealed
    assert sealing.matches(file, sealed)


@pytest.mark.parametrize("place", [0, 999, 1000, 2500, 4320])
def test_one_changed_byte_shows(file: Path, place: int) -> None:
    sealed, content = sealing.seal(file), bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert not sealing.matches(file, sealed)


def test_exchanged_pieces_show(file: Path) -> None:
    sealed, content = sealing.seal(file), file.read_bytes()
    file.write_bytes(content[1000:2000] + content[:1000] + content[2000:])
    assert not sealing.matches(file, sealed)


def test_a_shorter_or_missing_file_does_not_match(file: Path) -> None:
    sealed = sealing.seal(file)
    file.write_bytes(file.read_bytes()[:-1])
    assert not sealing.matches(file, sealed)
    file.unlink()
    assert not sealing.matches(file, sealed)


def test_an_empty_file_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert sealing.matches(tmp_path / "empty", sealing.seal(tmp_path / "empty"))


def test_what_cannot_be_read_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = sealing.seal(file)

    def fail(path: Path, start: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sealing, "_hash_piece", fail)
    with pytest.raises(StorageError, match="cannot be read"):
        sealing.matches(file, sealed)
