"""Kernels compiled before anybody launches them, in several processes, into Triton's cache.

What is in the cache already is only looked up. Processes are copies of this one, so that nothing has to be sent to
them; whoever uses a GPU may still call this, since the copies never do.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from triton.runtime.driver import driver

from quantkit.kernels.compiling.recording import Kernel, PaperDriver
from quantkit.progress import Progress, silent


@dataclass(frozen=True)
class Compiled:
    """What became of one kernel."""

    name: str
    entry: str  # its key in Triton's cache
    error: str = ""  # why it is not there


def compile_all(
    kernels: Sequence[Kernel], processes: int | None = None, on_kernel: Progress = silent
) -> list[Compiled]:
    """In the order of the kernels; the first ones are begun first. `processes`: as many as cores, if not given."""
    if not kernels:
        return []
    count = min(processes or len(os.sched_getaffinity(0)), len(kernels))
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, fork, initializer=_begin, initargs=(kernels,)) as pool:
        waiting = [pool.submit(_compile, number) for number in range(len(kernels))]
        for done in as_completed(waiting):
            on_kernel(done.result().name, len(kernels))
        return [one.result() for one in waiting]


_own: Sequence[Kernel] = ()  # of a process of the pool, which has no other task


def _begin(kernels: Sequence[Kernel]) -> None:
    global _own
    _own = kernels
    driver.set_active(PaperDriver(kernels[0].target))  # nothing may ask for a GPU here


def _compile(number: int) -> Compiled:
    kernel = _own[number]
    try:
        return Compiled(kernel.name, kernel.compile())
    except Exception as error:  # a kernel that this compiler refuses is reported; the others are of use without it
        return Compiled(kernel.name, "", f"{type(error).__name__}: {error}".splitlines()[0][:200])
