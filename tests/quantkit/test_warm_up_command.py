"""`quantkit warm-up`: what it refuses, and, as a process of its own, a model's kernels from one cache to another."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.cli import warm_up

ROOT = Path(__file__).parents[2]
RunCli = Callable[..., tuple[int, str, str]]
OPTIONS = ("--gpu", "l4", "--max-sequences", "1", "--max-context", "64", "--step-tokens", "16", "--json")


def run(cache: Path, *arguments: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "quantkit", "warm-up", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "which model?"),
        (("--to", "file", "--from", "other"), "--to writes the kernels of a model"),
        (("demo-draft", "--gpu", "l5"), "l4"),
        (("demo-draft", "--gpu", "h100", "--tensor-parallel", "2"), "one GPU"),
    ],
)
def test_what_it_refuses(arguments: tuple[str, ...], words: str, run_cli: RunCli) -> None:
    code, _, said = run_cli("warm-up", *arguments)
    assert code == 2
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--from", "some.kernels"), ("demo-draft", "--gpu", "l4")])
def test_without_triton_it_says_so(
    arguments: tuple[str, ...], run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "find_spec", lambda name: None)
    code, _, said = run_cli("warm-up", *arguments)
    assert (code, "pip install triton" in said, said.count("\n")) == (2, True, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_must_be_named(run_cli: RunCli) -> None:
    code, _, said = run_cli("warm-up", "demo-draft")
    assert (code, "--gpu h100" in said) == (2, True)


@pytest.mark.long
def test_kernels_travel(tmp_path: Path) -> None:
    file = str(tmp_path / "l4.kernels")
    made = run(tmp_path / "here", "demo-draft", *OPTIONS, "--to", file)
    assert made["refused"] == []
    assert made["target"] == "sm_89"
    assert made["kernels"] == made["written"]["kernels"] > 10
    there = tmp_path / "there"
    assert run(there, "--from", file, "--json")["installed"]["new"] == made["kernels"]
    run(there, "demo-draft", *OPTIONS)
    assert len(list(there.glob("*/*.cubin"))) == made["kernels"]  # nothing was compiled again
