"""Devices by name: `auto`, `cpu`, `cuda` or `cuda:N`. Whoever takes one asks here.

A GPU must be current in the thread that works on it: kernels of Triton, graphs, events and counters of memory go to the
current one, wherever their tensors are. Each thread has a current GPU of its own, at first `cuda:0`.
"""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from quantkit.errors import InputError

if TYPE_CHECKING:
    import torch  # the command line checks names before it loads torch

NAMES = "auto, cpu, cuda or cuda:N"
_NAME = re.compile(r"auto|cpu|cuda(:(?P<index>0|[1-9][0-9]{0,3}))?")


def is_device_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def resolve_device(name: str) -> str:
    """`auto` becomes `cuda` where there is a GPU, else `cpu`; any other name stays. Refuses what is not here."""
    import torch

    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise InputError(f"device {name!r} is not known; use {NAMES}")
    if name in ("auto", "cpu"):
        return "cuda" if name == "auto" and torch.cuda.is_available() else "cpu"
    if not torch.cuda.is_available():
        raise InputError(
            f"device '{name}' is not available: torch {torch.__version__} sees no GPU{_visible()}; use cpu"
        )
    count = torch.cuda.device_count()
    if int(found["index"] or 0) >= count:
        seen = "1 GPU, cuda:0" if count == 1 else f"{count} GPUs, cuda:0 to cuda:{count - 1}"
        raise InputError(f"device '{name}' is not available: torch sees {seen}{_visible()}; use one of these")
    return name


def find_device(name: str) -> torch.device:
    """A GPU comes with its index: `cuda` is the one that is current."""
    import torch

    device = torch.device(resolve_device(name))
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def on_device(device: torch.device | str) -> AbstractContextManager[object]:
    """Within it this GPU is current in this thread; afterwards the one before is. `cuda` and `cpu` change nothing."""
    import torch

    device = torch.device(device)
    return nullcontext() if device.type == "cpu" or device.index is None else torch.cuda.device(device)


def _visible() -> str:
    """Why there may be fewer GPUs than the machine has."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if shown is None else f" (CUDA_VISIBLE_DEVICES is '{shown}')"
