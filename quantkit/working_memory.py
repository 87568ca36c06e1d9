"""How much a run works on at once. Small pieces leave a GPU waiting for the host; memory bounds how large they get.

The answers depend on the device's size alone, never on what is free just now: a run that goes on where it was killed
sums in the same order.
"""

from __future__ import annotations

import torch

BATCH_TOKENS = 4096  # run through a block at once, on a CPU and on a GPU of less than 32 GB
_MOST_BATCHES = 8  # of these on a GPU with more
_GPU_BYTES_FOR_BATCH = 16 << 30
_GPU_SHARE = 16  # of a GPU's memory, for experts that are rounded together
_CPU_BYTES = 64 << 20


def batch_tokens(device: torch.device, *, eager: bool = False) -> int:
    """Tokens that run through a block at once; `eager`: attention is computed in full, which takes memory by itself."""
    if device.type != "cuda" or eager:
        return BATCH_TOKENS
    return BATCH_TOKENS * min(_MOST_BATCHES, max(1, _gpu_bytes(device) // _GPU_BYTES_FOR_BATCH))


def how_many_together(device: torch.device, each: int) -> int:
    """Experts that are rounded at once, or tokens gathered for one, by the bytes that each takes; at least one."""
    allowed = _gpu_bytes(device) // _GPU_SHARE if device.type == "cuda" else _CPU_BYTES
    return max(1, allowed // each)


def _gpu_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)
