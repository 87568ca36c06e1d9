"""Weights as indices into a table of values, scaled per block: `weight = table[code] * absmax[block]`.

Blocks run over the row-major flattened weight, across row ends; the last one may be short. NF4 places its 16 values at
the quantiles of a normal distribution, FP4 at those of a tiny float, E2M1 (`e2m1.py`) at those of another. Double
quantization stores the absmax of each block in 8 bits as well, against a second table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantkit.formats.base import Index, QuantizedWeight, Shape

NESTED_BLOCK = 256  # absmax values per block of the second quantization

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_POSITIVE = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # by bit pattern, in twelfths; codes 8..15 are negative
_E2M1_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the same, whole


@cache
def table_of(kind: str) -> Tensor:
    """The 16 values of `nf4`, `fp4` or `e2m1`, indexed by code."""
    if kind == "nf4":
        return torch.tensor(_NF4)
    positive = torch.tensor(_FP4_POSITIVE) / 12 if kind == "fp4" else torch.tensor(_E2M1_POSITIVE)
    return torch.cat([positive, -positive])


@cache
def table_on(device: torch.device, kind: str) -> Tensor:
    """The same on a device; copied there once, since a CUDA graph cannot hold copies from the host."""
    return table_of(kind).to(device)


@cache
def dynamic_table() -> Tensor:
    """The 256 values of the dynamic 8-bit map: seven decades, each with twice the resolution of the one below."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        midpoints = (edges[:-1] + edges[1:]) / 2 * 10 ** (decade - 6)
        values += midpoints.tolist() + (-midpoints).tolist()
    return torch.tensor(sorted(values))


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """uint8 index of the nearest table entry; a value in the middle of two takes the smaller entry."""
    ascending, order = table.to(values.device).sort()
    bounds = (ascending[:-1] + ascending[1:]) / 2
    rank = torch.bucketize(values, bounds, out_int32=True)
    in_order = torch.equal(order, torch.arange(len(order), device=order.device))  # all tables but FP4's
    return rank.to(torch.uint8) if in_order else order.to(torch.uint8)[rank]


def scale_blocks(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Flat values -> (values / absmax of their block, absmax float32 [blocks])."""
    count = values.numel()
    blocks = torch.nn.functional.pad(values.float().flatten(), (0, -count % block)).view(-1, block)
    absmax = blocks.abs().amax(-1)
    scaled = blocks * (1 / absmax.clamp(min=1e-38)).unsqueeze(-1)
    return scaled.clamp_(-1, 1).flatten()[:count], absmax


def unscale_blocks(values: Tensor, absmax: Tensor, block: int) -> Tensor:
    count = values.numel()
    padded = torch.nn.functional.pad(values, (0, -count % block)).view(-1, block)
    return (padded * absmax.unsqueeze(-1)).flatten()[:count]


@dataclass(frozen=True)
class NestedScales:
    """Block scales stored in 8 bits: `absmax = dynamic_table[code] * scale[code's block] + offset`."""

    codes: Tensor  # uint8 [blocks]
    scales: Tensor  # float32 [ceil(blocks / block)]
    offset: float  # a float32 value
    table: Tensor  # float32 [256]
    block: int = NESTED_BLOCK

    def decode(self) -> Tensor:
        offset = torch.full((), self.offset, dtype=torch.float32, device=self.codes.device)  # copies nothing there
        return unscale_blocks(self.table.to(self.codes.device)[self.codes.int()], self.scales, self.block) + offset


@dataclass(frozen=True)
class DividedScales:
    """Block scales in 8-bit floats, all divided by one number: `scale = value / divisor`."""

    values: Tensor  # float8_e4m3fn [blocks]
    divisor: Tensor  # float32 [1]

    def decode(self) -> Tensor:
        return self.values.float() / self.divisor


BlockScales = Tensor | NestedScales | DividedScales


def cut_scales(absmax: BlockScales, shape: Shape, outputs: Index, inputs: slice) -> BlockScales:
    """Scales [out * in] of a part of [out, in] blocks, in the form that they have."""
    if isinstance(absmax, Tensor):
        return absmax.view(shape)[outputs][:, inputs].flatten()
    if isinstance(absmax, DividedScales):
        bytes_ = absmax.values.view(torch.uint8).view(shape)[outputs][:, inputs].flatten()  # torch indexes no float8
        return DividedScales(bytes_.view(absmax.values.dtype), absmax.divisor)
    places, every = _regroup(shape, outputs, inputs, absmax.block)
    codes = absmax.codes.view(shape)[outputs][:, inputs].flatten()
    return NestedScales(codes, absmax.scales[places.to(codes.device)], absmax.offset, absmax.table, every)


def _regroup(shape: Shape, outputs: Index, inputs: Index, block: int) -> tuple[Tensor, int]:
    """Blocks run over a flattened [out, in]; a part of it has blocks of its own, none of which cross an old one.

    Returns the old block of every new one, and the size of the new ones.
    """
    row = _numbers(outputs) * shape[1]
    column = _numbers(inputs)
    if isinstance(inputs, Tensor):
        size = 1
    elif isinstance(outputs, slice) and len(column) == shape[1]:
        size = math.gcd(block, outputs.start * shape[1])
    else:
        size = math.gcd(block, shape[1], inputs.start, len(column))
    return (row[:, None] + column.to(row.device)).flatten()[::size] // block, size


def _numbers(index: Index) -> Tensor:
    return index if isinstance(index, Tensor) else torch.arange(index.start, index.stop)


def nest_scales(absmax: Tensor) -> NestedScales:
    """The second quantization, of block scales float32 [blocks]."""
    offset = absmax.mean()
    scaled, scales = scale_blocks(absmax - offset, NESTED_BLOCK)
    return NestedScales(nearest(scaled, dynamic_table()), scales, offset.item(), dynamic_table())


@dataclass(frozen=True)
class CodebookWeight(QuantizedWeight):
    """Table indices with their block scales."""

    kind: str  # nf4 | fp4 | e2m1
    codes: Tensor  # uint8 [out * in]
    absmax: BlockScales  # float [blocks]; e2m1: of the value 1, not of the largest
    block: int
    full_shape: Shape

    @property
    def shape(self) -> Shape:
        return self.full_shape

    @property
    def block_scales(self) -> Tensor:
        return self.absmax if isinstance(self.absmax, Tensor) else self.absmax.decode()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        values = table_on(self.codes.device, self.kind)[self.codes.int()]
        return unscale_blocks(values, self.block_scales, self.block).view(self.full_shape).to(dtype)

    def cut(self, outputs: Index, inputs: Index) -> CodebookWeight:
        """Where blocks would be cut apart, smaller ones take their place, with decoded scales."""
        (out, size), block = self.full_shape, self.block
        codes = self.codes.view(self.full_shape)[outputs][:, inputs]
        whole = isinstance(inputs, slice) and not (size % block or inputs.start % block or inputs.stop % block)
        if whole and isinstance(inputs, slice):
            blocks = slice(inputs.start // block, inputs.stop // block)
            absmax = cut_scales(self.absmax, (out, size // block), outputs, blocks)
        else:
            places, block = _regroup(self.full_shape, outputs, inputs, block)
            absmax = self.block_scales[places.to(codes.device)]
        return CodebookWeight(self.kind, codes.flatten(), absmax, block, (codes.shape[0], codes.shape[1]))


def quantize_codebook(weight: Tensor, kind: str, block: int, nested: bool) -> CodebookWeight:
    """Nearest table entries of a weight [out, in]."""
    scaled, absmax = scale_blocks(weight, block)
    scales = nest_scales(absmax) if nested else absmax
    return CodebookWeight(kind, nearest(scaled, table_of(kind)), scales, block, (weight.shape[0], weight.shape[1]))
