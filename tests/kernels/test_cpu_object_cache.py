"""Kernels that an earlier process compiled."""

from pathlib import Path

import pytest
import torch

from quantkit.kernels.cpu import compiling, object_cache
from quantkit.kernels.cpu.compiling import callable_at, compiled
from quantkit.kernels.cpu.language import I64, Code, Value

pytestmark = pytest.mark.kernel


def write_seven(code: Code, target: Value) -> None:
    code.store(code.constant(I64, 7), target)


def result() -> int:
    number = torch.zeros(1, dtype=torch.int64)
    callable_at(compiled("seven", 1, write_seven), 1)(number.data_ptr())
    return int(number)


def test_a_second_start_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is damaged is compiled again; what cannot be written is compiled each time."""
    compiles: list[str] = []
    optimized = compiling._optimized
    monkeypatch.setattr(
        compiling, "_optimized", lambda text, machine: compiles.append(text) or optimized(text, machine)
    )
    monkeypatch.setattr(object_cache, "cache_folder", lambda: tmp_path / "kernels")
    assert [result(), result()] == [7, 7]
    assert len(compiles) == 1
    (file,) = (tmp_path / "kernels").iterdir()
    file.write_bytes(file.read_bytes()[:-8])
    assert [result(), result()] == [7, 7]
    assert len(compiles) == 2
    (tmp_path / "taken").touch()
    monkeypatch.setattr(object_cache, "cache_folder", lambda: tmp_path / "taken")
    assert [result(), result()] == [7, 7]
    assert len(compiles) == 4
