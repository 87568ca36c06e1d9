"""Loads shares of blocks while every page of the files that holds nothing of a share is forbidden: reading one of them
ends the process. Run as a script, because of how it may end; prints how many bytes were forbidden, job by job.

    python guarded_load.py JOBS    JSON: [{"folder": ..., "tensor": 2, "rank": 0, "axes": {name: [rows, axis]}}]

Axes say how a tensor lies in its file, and along which of rows (0) and columns (1) it is cut.
"""

import ctypes
import json
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.loading import load_blocks
from quantkit.runtime.model.ranks import Ranks

NOTHING = 0  # PROT_NONE
libc = ctypes.CDLL(None, use_errno=True)


class Guarded(Checkpoint):
    """Every mapped tensor is forbidden outside the share of one rank of so many."""

    def __init__(self, folder: Path, rank: int, tensor: int, axes: dict[str, tuple[int, int]]) -> None:
        super().__init__(folder)
        self.forbidden = 0
        self._rank, self._tensor, self._axes = rank, tensor, axes

    def tensor(self, name: str) -> Tensor:
        mapped = super().tensor(name)
        if name in self._axes:
            rows, axis = self._axes[name]
            width = mapped.nbytes // rows
            for row in range(rows) if axis == 1 else [0]:
                self._guard(mapped.data_ptr() + row * width, width if axis == 1 else mapped.nbytes)
        return mapped

    def _guard(self, start: int, size: int) -> None:
        """Forbids a run of bytes but for this rank's part of it."""
        share = size // self._tensor
        self._forbid(start, start + self._rank * share)
        self._forbid(start + (self._rank + 1) * share, start + size)

    def _forbid(self, start: int, stop: int) -> None:
        """Whole pages only: their neighbours may be wanted."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            if libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(last - first), NOTHING):
                raise OSError(ctypes.get_errno(), "mprotect")
            self.forbidden += last - first


def load(folder: str, tensor: int, rank: int, axes: dict[str, tuple[int, int]]) -> int:
    guarded = max(tensor, 2)  # a process alone has the guards of two, and is not expected to survive
    checkpoint = Guarded(Path(folder), rank, guarded, axes)
    config = read_model_config(checkpoint.config)
    load_blocks(checkpoint, config, torch.float32, torch.device("cpu"), ranks=Ranks(tensor, 1, rank))
    return checkpoint.forbidden


if __name__ == "__main__":
    torch.set_num_threads(1)
    for job in json.loads(sys.argv[1]):
        print(load(**job), flush=True)
