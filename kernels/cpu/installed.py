"""Whether kernels of this room can run: asked before any of its other files is imported, which need llvmlite."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def can_compile() -> bool:
    return find_spec("llvmlite") is not None
