"""How much a run works on at once. Small pieces leave a GPU waiting for the host; memory bounds how large they get.

The answers depend on the device's size alone, never on what is free just now: a run that goes on where it was killed
sums in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quantkit.formats import Shape
from quantkit.methods.statistics import SAMPLE

BATCH_TOKENS = 4096  # run through a block at once, on a CPU and on a GPU of up to 32 GB
_MOST_BATCHES = 8  # of these on a GPU with more
_GPU_BYTES_FOR_BATCH = 16 << 30
_HESSIANS, _WEIGHTS = 4, 8  # copies at once: sums, stacked, factors twice; and what the search of a grid compares
_GPU_SHARE = 16  # of a GPU's memory, for experts that are rounded together
_CPU_BYTES = 64 << 20


def batch_tokens(device: torch.device, *, eager: bool = False) -> int:
    """Tokens that run through a block at once; `eager`: attention is computed in full, which takes memory by itself."""
    if device.type != "cuda" or eager:
        return BATCH_TOKENS
    return BATCH_TOKENS * min(_MOST_BATCHES, max(1, _gpu_bytes(device) // _GPU_BYTES_FOR_BATCH))


def experts_together(device: torch.device, shapes: Iterable[Shape]) -> int:
    """Experts that are rounded at once, by what is rounded of each one after the other: outputs and inputs."""
    largest = max(expert_bytes(*shape) for shape in shapes)
    return max(1, _bytes(device) // largest)


def expert_bytes(outputs: int, inputs: int) -> int:
    """Of one expert while it is rounded, in float32: its H and factors, its weights, and a sample of what it reads."""
    return 4 * inputs * (_HESSIANS * inputs + _WEIGHTS * outputs + SAMPLE)


def gathered_rows(device: torch.device, width: int) -> int:
    """Tokens for an expert that are gathered before their products are summed; a batch more than that at most."""
    return max(1, _bytes(device) // (16 * width))


def _bytes(device: torch.device) -> int:
    """That experts may take together; a single one takes more where it must."""
    return _gpu_bytes(device) // _GPU_SHARE if device.type == "cuda" else _CPU_BYTES


def _gpu_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)
