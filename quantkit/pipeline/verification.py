"""Decoding a written checkpoint, as any other reader would, and comparing it with what was promised.

That every tensor in the files is what was handed over, `CheckpointWriter` has seen to by then; here the layers must
decode to what the method computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.errors import QuantkitError

AT_ONCE = 256  # layers whose files stay open: opening one reads all its names, and what was read counts as memory


def fingerprint(weight: Tensor) -> int:
    """A number that any wrong, missing or misplaced value changes: the float32 bits, each times an odd number."""
    bits = weight.float().contiguous().view(torch.int32).flatten()
    total = 0
    for start in range(0, len(bits), 1 << 24):  # in pieces, to need no second weight's worth of memory
        piece = bits[start : start + (1 << 24)].long()
        position = torch.arange(start, start + len(piece), device=piece.device)
        total += int((piece * (2 * position + 1)).sum())
    return total % (1 << 63)


def verify_written(folder: Path, promised: Mapping[str, int], device: str = "cpu") -> None:
    """Decodes every quantized layer of a checkpoint and compares its fingerprint."""
    written, modules = Checkpoint(folder), list(promised)
    for start in range(0, len(modules), AT_ONCE):
        with written.kept_open():
            for module in modules[start : start + AT_ONCE]:
                _verify(written, module, promised[module], device)


def _verify(written: Checkpoint, module: str, promised: int, device: str) -> None:
    if module not in written.formats:
        raise QuantkitError(f"{module} cannot be found again in the written checkpoint")
    if fingerprint(written.weight(module, device=device)) != promised:
        raise QuantkitError(f"{module} decodes to other weights than were computed; memory is faulty, or this is a bug")
