"""Launches that only compile: the real launchers run, on tensors of this machine, and what they launch is assembled for
a card. Nothing is computed, so results are whatever was in memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from quantkit.kernels.card import Card, pretend

WARP = 32
MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # of a grid, in each direction
_RESOURCES = re.compile(r"Function (\S+?):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


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


class _PaperDriver:
    """What Triton asks of a driver before it launches."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # Triton keeps what it compiled for each device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling_for(card: Card) -> Iterator[list[Launch]]:
    """Within, every launch is compiled and listed instead; one that cannot be compiled does not raise."""
    launches: list[Launch] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        shape = tuple(grid(options)) if callable(grid) else tuple(grid)
        said = StringIO()
        try:
            with redirect_stderr(said), redirect_stdout(said):
                compiled = run(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            reason = next((line for line in lines if "; error" in line), lines[0])  # the assembler's own
            launches.append(Launch(self.__name__, shape, error=f"{type(error).__name__}: {reason.strip()}"))
            return
        launches.append(Launch(self.__name__, shape, *_resources(compiled)))

    before = driver._active
    major, minor = card.capability
    driver.set_active(_PaperDriver(GPUTarget("cuda", 10 * major + minor, WARP)))
    JITFunction.run = record
    try:
        with pretend(card):
            yield launches
    finally:
        JITFunction.run = run
        driver._active = before


def _resources(compiled: Any) -> tuple[int, int, int]:
    """Shared memory, registers and stack, as the assembler has written them into the result."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = _RESOURCES.search(said)
    assert found is not None, said
    registers, stack, static = int(found[2]), int(found[3]), int(found[4])
    return compiled.metadata.shared + static, registers, stack
