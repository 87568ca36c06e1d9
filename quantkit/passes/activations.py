"""Activations of all calibration sequences, in batches, kept where they fit: on the device, in memory, or on disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

HOST_BYTES = 256 << 20  # more goes to disk, where the system's cache keeps it as long as memory is free

Place = Literal["device", "host", "disk"]


class Activations:
    """A list of batches. Reading gives a batch on the device, wherever it is kept."""

    def __init__(self, device: torch.device, place: Place, folder: Path, name: str = "activations") -> None:
        self._device, self._place, self._file = device, place, folder / name
        self._kept: list[Tensor | _File] = []

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Tensor:
        kept = self._kept[index]
        return (kept if isinstance(kept, Tensor) else kept.read()).to(self._device, non_blocking=True)

    def __setitem__(self, index: int, batch: Tensor) -> None:
        self._kept[index] = self._stored(batch, index)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def append(self, batch: Tensor) -> None:
        self._kept.append(self._stored(batch, len(self)))

    def extend(self, batches: Iterable[Tensor]) -> None:
        for batch in batches:
            self.append(batch)

    def _stored(self, batch: Tensor, index: int) -> Tensor | _File:
        if self._place == "device":
            return batch.to(self._device)
        if self._place == "host":
            return batch.cpu()
        return _File(self._file.with_name(f"{self._file.name}-{index:05d}.bin"), batch)


class _File:
    """One tensor in a file, read and written whole: mapped pages would count as memory in use."""

    def __init__(self, file: Path, tensor: Tensor) -> None:
        self.file, self.shape, self.dtype = file, tensor.shape, tensor.dtype
        tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tofile(file)

    def read(self) -> Tensor:
        return torch.from_numpy(np.fromfile(self.file, dtype=np.uint8)).view(self.dtype).view(self.shape)


def choose_place(nbytes: int, device: torch.device) -> Place:
    """Where activations of this size fit without crowding out the work itself."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if nbytes <= free // 8:
            return "device"
    return "host" if nbytes <= min(HOST_BYTES, available_memory() // 4) else "disk"


def available_memory() -> int:
    """Bytes of main memory that could be taken now; half of all memory where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
