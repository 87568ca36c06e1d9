"""Launches that only compile, or that are only listed: the real launchers run, on tensors of this machine, and what
they launch is assembled for a card. Nothing is computed, so results are whatever was in memory.

Triton keeps what it has compiled, by source, constants and target (TRITON_CACHE_DIR, or .triton/cache in the home
folder): a second run compiles only what has changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compile_matrix.amd import AmdCard
from compile_matrix.in_child import in_child
from quantkit.kernels.card import Card
from quantkit.kernels.compiling.recording import instead_of_launches, target_of

MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # of a grid, in each direction
_RESOURCES = re.compile(r"Function (\S+?):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
Resources = tuple[int, int, int]  # shared memory, registers, stack
_known: dict[str, Resources] = {}  # of compiled kernels, by their hash


@dataclass(frozen=True)
class Launch:
    """What one launch takes of a card, or why it cannot be."""

    kernel: str
    grid: tuple[int, ...]
    shared: int = 0  # bytes, tables that PTX declares included
    registers: int = 0  # of a thread
    stack: int = 0  # bytes of a thread, for what found no register
    error: str = ""

    def troubles(self, card: Card, most_stack: int) -> Iterator[str]:
        if self.error:
            yield self.error
        if self.shared > card.shared:
            yield f"needs {self.shared} bytes of shared memory, {card.target} has {card.shared}"
        if self.stack > most_stack:
            yield f"spills {self.stack} bytes a thread"
        for asked, most in zip(self.grid, MOST_PROGRAMS, strict=False):
            if asked > most:
                yield f"asks for a grid of {self.grid}"


@contextmanager
def recording(card: Card, *, compiles: bool = True) -> Iterator[list[Launch]]:
    """Within, every launch is listed instead, and compiled first if `compiles`; one that cannot be does not raise."""
    launches: list[Launch] = []
    run = JITFunction.run
    guarded: Callable[[Callable[[], Resources]], Resources] = in_child if isinstance(card, AmdCard) else _here

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launch = Launch(self.__name__, tuple(grid(options)) if callable(grid) else tuple(grid))
        if compiles:
            with _quiet() as said:
                try:
                    needs = guarded(lambda: _resources(run(self, *args, grid=grid, warmup=True, **options)))
                    launch = replace(launch, shared=needs[0], registers=needs[1], stack=needs[2])
                except Exception as error:
                    launch = replace(launch, error=_reason(error, said.read_text(encoding="utf-8")))
        launches.append(launch)

    with instead_of_launches(card, record, _target(card)):
        yield launches


def _target(card: Card) -> GPUTarget:
    if isinstance(card, AmdCard):
        return GPUTarget("hip", card.architecture, card.warp)
    return target_of(card)


@contextmanager
def _quiet() -> Iterator[Path]:
    """What Python and the compiler's own code print goes into a file."""
    with tempfile.NamedTemporaryFile() as file, redirect_stdout(StringIO()):
        kept = os.dup(2)
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield Path(file.name)
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


def _here(work: Callable[[], Resources]) -> Resources:
    return work()


def _reason(error: Exception, said: str) -> str:
    """The assembler's own line where there is one, with the instruction that it refuses."""
    lines = [line.strip() for line in [*str(error).splitlines(), *said.splitlines()]] or [""]
    for number, line in enumerate(lines):
        if "invalid instruction" in line:
            return f"{line}: {lines[number + 1]}"
    for sign in ("; error", "error:"):
        if own := [line for line in lines if sign in line]:
            return own[0]
    return f"{type(error).__name__}: {lines[0]}"


def _resources(compiled: Any) -> Resources:
    if compiled.hash not in _known:
        _known[compiled.hash] = _of_amd(compiled) if "amdgcn" in compiled.asm else _of_nvidia(compiled)
    return _known[compiled.hash]


def _of_nvidia(compiled: Any) -> Resources:
    """As the assembler has written them into the result."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = _RESOURCES.search(said)
    assert found is not None, said
    registers, stack, static = int(found[2]), int(found[3]), int(found[4])
    return compiled.metadata.shared + static, registers, stack


def _of_amd(compiled: Any) -> Resources:
    """As the end of the assembly says."""
    counts = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size): +(\d+)", compiled.asm["amdgcn"]))
    return compiled.metadata.shared, int(counts["vgpr_count"]), int(counts["private_segment_fixed_size"])
