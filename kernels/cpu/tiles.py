"""How codes of few bits lie in memory, so that a CPU reads them once, in order, and multiplies them at once.

A tile has 16 outputs. For each step of 32 inputs (16 where scales want it) it has its planes of bits behind each other:
4 bits are one plane of 4, 3 bits one of 2 and one of 1. A plane is vectors of 64 bytes; byte `4 * output + input` of a
vector holds one input of every quad in it, from the low bits on: of a plane of 4 bits, byte 0 of vector 0 has input 0
of output 0 in its low half and input 4 in its high half.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.kernels.cpu.float8 import RAISED_UNIT
from quantkit.kernels.cpu.processor import Processor

ROWS = 16
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


@dataclass(frozen=True)
class Codes:
    """What codes of a weight stand for.

    bits        2 to 8
    step        inputs that lie together
    zero        the code that means 0 everywhere; None: every group has its own
    zeros_from  stored zero points are larger by this: codes of 8 bits are, where a processor multiplies signed bytes
    digits      of the 16 values of a table, the first counting 256 times the second; () for integers
    scale       what the last digit counts
    float8      codes are bits of float8 e4m3, and x is raised (`float8.py`)
    """

    bits: int
    step: int = 32
    zero: int | None = None
    zeros_from: int = 0
    digits: tuple[tuple[int, ...], ...] = ()
    scale: float = 1.0
    float8: bool = False

    @cached_property
    def planes(self) -> tuple[int, ...]:
        return PLANES[self.bits]

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The values of a table, all digits together: below 2^24, so a float32 holds them."""
        values = [0] * len(self.digits[0])
        for digit in self.digits:
            values = [256 * value + more for value, more in zip(values, digit, strict=True)]
        return tuple(values)

    @property
    def has_zero_points(self) -> bool:
        return self.zero is None and not self.digits

    @property
    def dot_bits(self) -> int:
        """Of the bytes that are multiplied."""
        return 8 if self.digits else self.bits

    def used(self, digits: int) -> int:
        """Digits of values that are multiplied with so many of x: as many, so that both lose about as much."""
        return min(digits, len(self.digits)) if self.digits else 1

    def tables(self, processor: Processor, digits: int) -> list[tuple[int, ...]]:
        """As bytes that the processor multiplies, for so many digits of x."""
        lift = 0 if processor.multiplies_signed else 128
        return [tuple(value + lift for value in digit) for digit in self.digits[: self.used(digits)]]

    def offsets(self, processor: Processor, digits: int) -> list[int]:
        """What each byte is too large by; that of integers is not known here where groups have zero points."""
        if self.digits:
            return [0 if processor.multiplies_signed else 128] * self.used(digits)
        return [self.zero or 0]

    def unit(self, used: int) -> float:
        """What the last of the used digits counts."""
        if self.float8:
            return RAISED_UNIT
        return self.scale * 256.0 ** (max(len(self.digits), 1) - used)


def pack(codes: Tensor, kind: Codes) -> Tensor:
    """uint8 [tiles, bytes] of codes [outputs, inputs]; both are padded with zeros."""
    outputs, inputs = codes.shape
    codes = pad(codes, (0, -inputs % kind.step, 0, -outputs % ROWS))
    tiles, steps = codes.shape[0] // ROWS, codes.shape[1] // kind.step
    quads = codes.view(tiles, ROWS, steps, kind.step // 4, 4).permute(0, 2, 3, 1, 4)  # tile, step, quad, output, input
    planes, shift = [], 0
    for bits in kind.planes:
        each = 8 // bits
        part = (quads >> shift) & ((1 << bits) - 1)
        part = part.reshape(tiles, steps, -1, each, 4 * ROWS)
        held = torch.zeros_like(part[:, :, :, 0])
        for place in range(each):
            held |= part[:, :, :, place] << (place * bits)
        planes.append(held.flatten(2))
        shift += bits
    return torch.cat(planes, 2).flatten(1).contiguous()


def by_tile(values: Tensor) -> Tensor:
    """[outputs, groups] as [tiles, groups, 16]: what a tile reads for a group lies together."""
    outputs, groups = values.shape
    values = pad(values, (0, 0, 0, -outputs % ROWS))
    return values.view(-1, ROWS, groups).mT.contiguous()
