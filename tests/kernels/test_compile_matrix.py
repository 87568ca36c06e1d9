"""Kernels assemble for cards that are not here, fit their shared memory, keep what they need in registers, and ask for
grids that exist. Compiled in processes of their own: in this one Triton interprets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

SUPPORT = Path(__file__).parents[1] / "support"
COVER = 60  # every 60th compilation
PLANTED = """
import torch
from compile_matrix.recorder import compiling_for
from quantkit.formats import CtPacked
from quantkit.kernels.card import KNOWN
from quantkit.kernels.linear.weight_only import assembly, skinny
from quantkit.kernels.linear.weight_only.weight import lay_out

weight, x = lay_out(CtPacked().quantize(torch.randn(256, 512))), torch.zeros(256, 512, dtype=torch.bfloat16)
small, large = skinny.SkinnyConfig(32, 8, 2, 3), skinny.SkinnyConfig(128, 256, 8, 4)
with compiling_for(KNOWN["sm_89"]) as tight:
    skinny.matmul(x.half(), weight, large)
with compiling_for(KNOWN["sm_80"]) as launches:
    skinny.matmul(x[:8], weight, small)
    assembly._fused = lambda line: line
    assembly.assembly.cache_clear()
    skinny.matmul(x[:8], weight, small)
for card, found in (("sm_80", launches), ("sm_89", tight)):
    for launch in found:
        print(list(launch.troubles(KNOWN[card], 64)))
"""


def run(*arguments: str) -> str:
    paths = os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def report(part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("-m", "compile_matrix", "--part", part))
    return found


def test_a_cover_assembles_and_fits() -> None:
    found = report(f"1/{COVER}")
    assert found["troubles"] == []
    assert sum(found["launches"].values()) > 40
    assert {"_skinny", "_eight_bit", "_decode", "_prefill"} <= set(found["launches"])


def test_faults_are_seen() -> None:
    """Instructions that a card does not have, and a tile that is too large."""
    right, old, large = run("-c", PLANTED).splitlines()
    assert right == "[]"
    assert "sub.bf16x2" in old
    assert "shared memory" in large
