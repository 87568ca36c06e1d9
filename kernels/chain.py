"""Launches that begin as the launch before them ends: programmatic dependent launch, on Hopper and later GPUs.

A step of decoding is hundreds of short kernels in a row. Each would wait until the one before has ended and its writes
can be seen, and only then start its programs. A chained kernel's programs start as those of the launch before exit, and
the kernel calls `wait_for_last` before any return, load or store of what other kernels write. The wait ends when the
launch before has ended; since every chained kernel waits, that holds for all launches before. What no kernel writes,
as weights, may be read before it.

QUANTKIT_CHAINED_LAUNCHES=0 turns it off. docs/performance/notebook.md has what it brings, and what
starting earlier still did.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from quantkit.kernels.card import card_of


@triton.jit
def wait_for_last(CHAINED: tl.constexpr):
    if CHAINED:
        cuda.gdc_wait()


def chained(device: torch.device) -> dict[str, bool]:
    """What a kernel with a CHAINED constant is launched with."""
    if triton.knobs.runtime.interpret or not (_wanted() and card_of(device).chains_launches):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


@cache
def _wanted() -> bool:
    return os.environ.get("QUANTKIT_CHAINED_LAUNCHES", "1") != "0"
