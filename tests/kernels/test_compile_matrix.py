"""Kernels assemble for cards that are not here, fit their shared memory, keep what they need in registers, and ask for
grids that exist. Compiled in processes of their own: in this one Triton interprets.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_matrix.loops import loops_of
from quantkit.kernels.card import KNOWN

ROOT = Path(__file__).parents[2]
HOPPER_ALONE = {"hopper_kernel", "_hopper_prefill"}
PLANTED = """
import torch
from compile_matrix.recorder import recording
from quantkit.formats import CtPacked
from quantkit.kernels.card import KNOWN
from quantkit.kernels.linear.weight_only import assembly, skinny
from quantkit.kernels.linear.weight_only.weight import lay_out

weight, x = lay_out(CtPacked().quantize(torch.randn(256, 512))), torch.zeros(256, 512, dtype=torch.bfloat16)
small, large = skinny.SkinnyConfig(32, 8, 2, 3), skinny.SkinnyConfig(128, 256, 8, 4)
with recording(KNOWN["sm_89"]) as tight:
    skinny.matmul(x.half(), weight, large)
with recording(KNOWN["sm_80"]) as launches:
    skinny.matmul(x[:8], weight, small)
    assembly._fused = lambda line: line
    assembly.assembly.cache_clear()
    skinny.matmul(x[:8], weight, small)
with recording(KNOWN["sm_80"], compiles=False) as listed:
    skinny._skinny[1, 65_536](x)
for card, found in (("sm_80", launches), ("sm_89", tight), ("sm_80", listed)):
    for launch in found:
        print(list(launch.troubles(KNOWN[card], 64)))
"""


def run(*arguments: str) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def report(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("-m", "compile_matrix", "--processes", "1", *arguments))
    return found


def launched_kernels() -> Iterator[str]:
    """Functions that Triton compiles and that are launched somewhere: `name[grid](...)`."""
    trees = [
        ast.parse(file.read_text(encoding="utf-8"))
        for room in ("kernels", "runtime", "eval")
        for file in (ROOT / room).rglob("*.py")
    ]
    compiled = {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(mark).startswith(("triton.jit", "gluon.jit")) for mark in node.decorator_list)
    }
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                names = {part.id for part in ast.walk(node.func.value) if isinstance(part, ast.Name)}
                yield from names & compiled


def test_every_kernel_has_a_case_and_every_grid_exists() -> None:
    found = report("--list", "--cards", "sm_86,sm_90")
    assert set(found["launches"]) == set(launched_kernels())
    assert found["troubles"] == []


def test_a_cover_assembles_and_fits() -> None:
    """Every kernel for one card, all cards in turn; a second run takes what Triton has kept."""
    found = report("--cover")
    assert found["troubles"] == []
    assert set(found["kernels"]) == set(launched_kernels())
    assert set(found["cards"]) == set(KNOWN)
    assert all(need["registers"] > 0 for needs in found["kernels"].values() for need in needs.values())
    assert all(set(found["kernels"][kernel]) == {"sm_90"} for kernel in HOPPER_ALONE)


@pytest.mark.long
@pytest.mark.parametrize("part", range(1, 9))
def test_the_matrix_assembles_and_fits(part: int) -> None:
    """In eighths, so that each quarter of the long tests has one for each of two processes."""
    found = report("--turns", "--part", f"{part}/8")
    assert found["troubles"] == []
    assert found["pairs"] > 300


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;              /* 0x00000a00ff017624 */
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;             /* 0x0000000102027810 */
        /*0020*/                   ISETP.GE.AND P0, PT, R2, R3, PT ;   /* 0x000000030200720c */
        /*0030*/              @!P0 BRA 0x10 ;                          /* 0xffffffd000008947 */
        /*0040*/               @P1 BRA 0x60 ;                          /* 0x0000001000001947 */
        /*0050*/                   IADD3 R4, R4, 0x1, RZ ;             /* 0x0000000104047810 */
        /*0060*/                   BRA 0x60;                           /* 0xfffffff000007947 */
"""


def test_loops_are_counted() -> None:
    """From a branch's target to the branch; neither one that leads on, nor the one to itself that ends every kernel."""
    assert loops_of(SASS) == [3]


@pytest.mark.long
def test_tokens_as_rows_take_fewer_instructions() -> None:
    """As docs/explanations/kernels.md has it: tiles of 32 tokens, programs of one warp."""
    heads = run("-m", "compile_matrix.loops", "--only", "attention of 400 guesses torch.int8")
    tiles = "rows torch.int8 IntegerDecodeConfig(block_n=32, num_warps=1, num_stages=3"
    rows = run("-m", "compile_matrix.loops", "--only", tiles)
    longest = [max(json.loads(line[line.rindex("[") :])) for line in (rows.strip(), heads.strip())]
    assert longest[0] < longest[1] / 2


@pytest.mark.long
def test_faults_are_seen() -> None:
    """Instructions that a card does not have, a tile that is too large, and a grid that does not exist."""
    right, old, large, wide = run("-c", PLANTED).splitlines()
    assert right == "[]"
    assert "sub.bf16x2" in old
    assert "shared memory" in large
    assert "grid" in wide
