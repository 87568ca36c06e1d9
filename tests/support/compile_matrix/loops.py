"""`python -m compile_matrix.loops --only NAME --card sm_90`: how many instructions the loops of a case's kernels have.

Counted in `cuobjdump -sass` of what Triton compiles, in bfloat16: a loop is what lies between a branch back and its
target, so that one loop within another counts twice. Nothing is launched, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from compile_matrix.cases import all_cases
from compile_matrix.pairs import pretend
from quantkit.kernels.card import KNOWN, Card
from quantkit.kernels.compiling.recording import instead_of_launches, target_of

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?);")
_BRANCH = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)")


def loops_of(sass: str) -> list[int]:
    """Instructions of each loop, in the order of the branches that close them."""
    instructions = [(int(place, 16), text) for place, text in _INSTRUCTION.findall(sass)]
    loops = []
    for place, text in instructions:
        branch = _BRANCH.search(text)
        if branch and (target := int(branch[1], 16)) < place:
            loops.append(sum(target <= other <= place for other, _ in instructions))
    return loops


def loops_of_case(only: str, card: Card) -> list[tuple[str, str, list[int]]]:
    """(case, kernel, loops) of every launch of the cases whose name has `only` in it."""
    found: list[tuple[str, str, list[int]]] = []
    run, name = JITFunction.run, ""

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        found.append((name, self.__name__, loops_of(_sass(compiled.asm["cubin"]))))

    with pretend(card):
        cases = [case for case in all_cases(card) if only in case.name and not case.grid_only]
    with instead_of_launches(card, record, target_of(card)):
        for case in cases:
            name = case.name
            case.launch(torch.bfloat16)
    return found


def _sass(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="compile_matrix.loops")
    parser.add_argument("--only", required=True, help="cases whose name has this in it")
    parser.add_argument("--card", choices=KNOWN, default="sm_90")
    given = parser.parse_args()
    found = loops_of_case(given.only, KNOWN[given.card])
    if not found:
        parser.error(f"no case has '{given.only}' in its name")
    for case, kernel, loops in found:
        print(f"{case}: {kernel} {loops}")


if __name__ == "__main__":
    main()
