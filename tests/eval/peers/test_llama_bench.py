"""Ours beside llama.cpp, with a program in its place that answers as llama-bench does."""

import csv
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.eval.peers import llama_bench

ANSWER = """#!/bin/sh
echo '[{"samples_ts": [10.0, 20.0], "build_number": 7, "build_commit": "abc"}]'
"""


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(ANSWER, encoding="utf-8")
    program.chmod(0o755)
    output = tmp_path / "cpu.csv"
    words = [str(tmp_path), "--model", "tiny", "--ours", "shape:tiny:w4", "--theirs", str(tmp_path / "tiny.gguf")]
    llama_bench.main([*words, "--rounds", "1", "--threads", "1", "--output", str(output)])
    with output.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert [(row["engine"], row["format"], row["load"]) for row in found] == [
        *(("quantkit", "shape:tiny:w4", load) for load in ("1 request", "prompt 128", "8 requests")),
        *(("llama.cpp", "tiny.gguf", load) for load in ("1 request", "prompt 128")),
    ]
    assert {row["tokens_per_second"] for row in found[3:]} == {"20"}
    assert found[3]["version"] == "build 7 abc"
    assert all(float(row["tokens_per_second"]) > 0 for row in found)
    assert str(tmp_path) not in output.read_text(encoding="utf-8")
    assert "tokens/s" in capsys.readouterr().out


def test_needs_the_program(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no llama-bench; build llama\.cpp"):
        llama_bench.main([str(tmp_path), "--model", "tiny", "--theirs", "tiny.gguf"])
