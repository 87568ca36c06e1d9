"""The process that compiles beside a start: what it notes, and that it ends in one line where it cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.kernels.card import KNOWN
from quantkit.runtime.compiling_ahead import job_of
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.paper import process

COMMAND = [sys.executable, "-m", "quantkit.runtime.paper.process"]


def job(model: str, **options: Any) -> dict[str, Any]:
    made = job_of(model, EngineOptions(device="cpu", **options), KNOWN["sm_90"], 10 << 30)
    travelled: dict[str, Any] = json.loads(json.dumps(made))
    return travelled


def test_a_job_is_noted_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing is `paper`'s and compiling is `kernels/compiling`'s: here nothing is listed."""
    asked: list[tuple[str, int]] = []

    def listed(model: str, options: EngineOptions, card: Any, available: int) -> list[Any]:
        assert card == KNOWN["sm_90"]
        asked.append((model, available))
        return []

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(process, "kernels_of", listed)
    for _ in range(2):
        process.compile_job(job("demo-draft"))
    assert asked == [("demo-draft", 10 << 30)]
    process.compile_job(job("demo-draft", kv_dtype="int8"))
    process.compile_job(job("demo", kv_dtype="int8"))
    assert [model for model, _ in asked] == ["demo-draft", "demo-draft", "demo"]


def test_what_cannot_be_listed_is_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    asked = json.dumps(job(str(tmp_path / "nowhere")))
    done = subprocess.run(COMMAND, input=asked, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("quantkit: kernels are compiled when they are needed: ")
    assert done.stderr.count("\n") == 1
