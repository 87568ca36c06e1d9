"""Quantizing needs the memory of one block, not of the model.

The shape is that of a model with 1.5 billion parameters in 28 blocks. Peak memory does not depend on the number of
blocks, so two of them show it; QUANTKIT_TEST_BLOCKS=28 runs the whole model.
"""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long
LIMIT_GIB = 3.0
LAYERS_OF_A_BLOCK = 7


@pytest.mark.parametrize(("recipe", "changes"), [("gptq-w4g128", ()), ("awq-w4g128", ("--set", "method.points=3"))])
def test_memory_of_one_block(recipe: str, changes: tuple[str, ...]) -> None:
    """A process of its own, so that its peak is its own. Memory does not depend on how many scales AWQ tries."""
    blocks = os.environ.get("QUANTKIT_TEST_BLOCKS", "2")
    arguments = ["qwen2.5-1.5b", recipe, *changes, "--blocks", blocks, "--samples", "128", "--seq-len", "32"]
    arguments += ["--quality-windows", "1"]  # its memory does not depend on their number either
    command = [sys.executable, "-m", "quantkit.eval.scale", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    row = json.loads(run.stdout)
    assert row["layers"] == int(blocks) * LAYERS_OF_A_BLOCK
    assert row["peak_resident_gib"] < LIMIT_GIB
