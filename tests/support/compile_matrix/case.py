"""What one case is, and the sizes that cases share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

HALVES = (torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """One call of a launcher, for tokens of some dtype.

    `tried`: the tuner may measure it, and passes by what does not fit; nothing else chooses it.
    `grid_only`: other cases compile these kernels; this one asks for many programs, so its grid is looked at alone.
    `slow`: it takes seconds to compile, so it is compiled for bfloat16 alone, and no cover has it.
    """

    name: str
    launch: Callable[[torch.dtype], object]
    tried: bool = False
    grid_only: bool = False
    slow: bool = False
