"""What a step of learned rounding needs of one linear on a GPU: its weight as it is rounded now, and how that changes.

Layout   anchors, offsets, offsets' gradient  float32 [out, groups, size]; scales, zeros and their gradients  float32
         [out, groups]; weight and upstream  [out, groups * size], float32 or 16 bits; all contiguous
Meaning  `reference.learned_grid`: weight = scale * (clamp(round(anchor / scale + offset) + zero, 0, top) - zero), and
         rounding has the slope 1, but 0 where the clamp holds
Limits   groups of up to 16,384 weights

Torch reads and writes all numbers of a linear about thirty times for this, here they are read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.digits import ROUND

LARGEST_GROUP = 16384
_TILE = 2048  # weights of a program, or a whole group


@triton.jit
def _place(groups, size, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """(group, its mask, element, its mask) of a program's tile."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    inside = group < groups
    weight = tl.arange(0, SIZE)
    return (
        group,
        inside,
        group.to(tl.int64)[:, None] * size + weight[None, :],
        inside[:, None] & (weight < size)[None, :],
    )


@triton.jit
def _codes(anchors, offsets, scale, zero, element, real):
    """(anchor / scale, code before the clamp)."""
    steps = tl.div_rn(tl.load(anchors + element, mask=real, other=0.0), scale[:, None])
    moved = steps + tl.load(offsets + element, mask=real, other=0.0)
    return steps, ((moved + ROUND) - ROUND) + zero[:, None]


@triton.jit
def _decode_grid(anchors, offsets, scales, zeros, weight, groups, size, top, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    group, inside, element, real = _place(groups, size, GROUPS, SIZE)
    scale = tl.load(scales + group, mask=inside, other=1.0)
    zero = tl.load(zeros + group, mask=inside, other=0.0)
    _, code = _codes(anchors, offsets, scale, zero, element, real)
    code = tl.minimum(tl.maximum(code, 0.0), top)
    value = (code - zero[:, None]) * scale[:, None]
    tl.store(weight + element, value.to(weight.dtype.element_ty), mask=real)


@triton.jit
def _grid_gradients(
    upstream,
    anchors,
    offsets,
    scales,
    zeros,
    of_offsets,
    of_scales,
    of_zeros,
    groups,
    size,
    top,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    group, inside, element, real = _place(groups, size, GROUPS, SIZE)
    scale = tl.load(scales + group, mask=inside, other=1.0)
    zero = tl.load(zeros + group, mask=inside, other=0.0)
    steps, code = _codes(anchors, offsets, scale, zero, element, real)
    wanted = tl.load(upstream + element, mask=real, other=0.0).to(tl.float32)
    free = tl.where((code < 0.0) | (code > top), 0.0, wanted)
    code = tl.minimum(tl.maximum(code, 0.0), top)
    tl.store(of_offsets + element, free * scale[:, None], mask=real)
    tl.store(of_scales + group, tl.sum(wanted * (code - zero[:, None]) - free * steps, axis=1), mask=inside)
    tl.store(of_zeros + group, -tl.sum(wanted - free, axis=1) * scale, mask=inside)


def _cut(anchors: Tensor) -> tuple[tuple[int], tuple[int, int], dict[str, int]]:
    """(grid, groups and their size, constants)."""
    size = anchors.shape[-1]
    assert size <= LARGEST_GROUP, f"a group of {size} weights, at most {LARGEST_GROUP} fit"
    groups, padded = anchors.numel() // size, triton.next_power_of_2(size)
    together = max(1, _TILE // padded)
    constants = {"GROUPS": together, "SIZE": padded, "num_warps": max(4, padded // 1024)}
    return (triton.cdiv(groups, together),), (groups, size), constants


def decode(anchors: Tensor, offsets: Tensor, scales: Tensor, zeros: Tensor, top: int, out: Tensor) -> None:
    """Writes the weight that the offsets stand for to `out` [out, in]."""
    assert out.is_contiguous()
    grid, sizes, constants = _cut(anchors)
    _decode_grid[grid](anchors, offsets, scales.contiguous(), zeros.contiguous(), out, *sizes, float(top), **constants)


def gradients(
    upstream: Tensor, anchors: Tensor, offsets: Tensor, scales: Tensor, zeros: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of offsets, scales and zero points, from that of the weight [out, in]."""
    assert upstream.is_contiguous()
    grid, sizes, constants = _cut(anchors)
    found = torch.empty_like(anchors), torch.empty_like(scales), torch.empty_like(zeros)
    known = (upstream, anchors, offsets, scales.contiguous(), zeros.contiguous())
    _grid_gradients[grid](*known, *found, *sizes, float(top), **constants)
    return found
