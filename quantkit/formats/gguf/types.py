"""Where every bit of a GGUF block lies, as data.

A block has one 16-bit scale for 32 or 256 neighbouring inputs of a row. Large blocks have a small whole-number scale of
their own for every group of 16 or 32 inputs, and some types a minimum besides:

    weight = scale * small scale * (code - zero)                     or table[code] instead of (code - zero)
    weight = scale * small scale * code - minimum * small minimum    Q2_K, Q4_K, Q5_K
    weight = scale * code + minimum                                  Q4_1, Q5_1

A plane is a run of bytes with some bits of every value. Bytes come in runs: the lowest bits of a run's bytes are the
first values, as many as the run has bytes, the next bits the values after those, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Plane:
    """`bits` of every value of a field, in runs of `run` bytes that begin `start` bytes after the block does."""

    start: int
    bits: int
    run: int

    def nbytes(self, values: int) -> int:
        return values * self.bits // 8


@dataclass(frozen=True)
class BlockType:
    """One type of blocks.

    size         inputs of a block
    codes        planes of the codes, the lowest bits first
    scale_at     where the 16-bit scale begins
    minimum_at   where the 16-bit minimum begins; None: there is none
    group        inputs that share a small scale; `size` where there are none
    scales       planes of the small scales, and behind them the small minimums, the lowest bits first
    pairs_at     where 12 bytes begin that hold eight small scales and eight small minimums of 6 bits instead
    zero         the code that means 0; where it is 128, the file has signed bytes
    scale_zero   the same of small scales
    table        what codes stand for, in place of `code - zero`
    """

    name: str
    size: int
    codes: tuple[Plane, ...]
    scale_at: int
    minimum_at: int | None = None
    group: int = 32
    scales: tuple[Plane, ...] = ()
    pairs_at: int | None = None
    zero: int = 0
    scale_zero: int = 0
    table: tuple[int, ...] = ()

    @property
    def bits(self) -> int:
        """Of a code."""
        return sum(plane.bits for plane in self.codes)

    @property
    def groups(self) -> int:
        """Small scales of a block; 1 where it has none."""
        return self.size // self.group

    @property
    def has_groups(self) -> bool:
        return self.groups > 1

    @property
    def has_mins(self) -> bool:
        return self.minimum_at is not None

    @property
    def small_numbers(self) -> int:
        """Small scales and minimums of a block."""
        return self.groups * (1 + self.has_mins) if self.has_groups else 0

    @cached_property
    def nbytes(self) -> int:
        """Of a block."""
        planes = sum(plane.nbytes(self.size) for plane in self.codes)
        planes += sum(plane.nbytes(self.small_numbers) for plane in self.scales)
        return planes + (12 if self.pairs_at is not None else 0) + 2 * (1 + self.has_mins)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.size


_ALL = (
    BlockType("Q4_0", 32, (Plane(2, 4, 16),), scale_at=0, zero=8),
    BlockType("Q4_1", 32, (Plane(4, 4, 16),), scale_at=0, minimum_at=2),
    BlockType("Q5_0", 32, (Plane(6, 4, 16), Plane(2, 1, 1)), scale_at=0, zero=16),
    BlockType("Q5_1", 32, (Plane(8, 4, 16), Plane(4, 1, 1)), scale_at=0, minimum_at=2),
    BlockType("Q8_0", 32, (Plane(2, 8, 32),), scale_at=0, zero=128),
    BlockType(
        "Q2_K",
        256,
        (Plane(16, 2, 32),),
        scale_at=80,
        minimum_at=82,
        group=16,
        scales=(Plane(0, 4, 16),),
    ),
    BlockType(
        "Q3_K",
        256,
        (Plane(32, 2, 32), Plane(0, 1, 32)),
        scale_at=108,
        group=16,
        scales=(Plane(96, 4, 8), Plane(104, 2, 4)),
        zero=4,
        scale_zero=32,
    ),
    BlockType("Q4_K", 256, (Plane(16, 4, 32),), scale_at=0, minimum_at=2, pairs_at=4),
    BlockType("Q5_K", 256, (Plane(48, 4, 32), Plane(16, 1, 32)), scale_at=0, minimum_at=2, pairs_at=4),
    BlockType(
        "Q6_K",
        256,
        (Plane(0, 4, 64), Plane(128, 2, 32)),
        scale_at=208,
        group=16,
        scales=(Plane(192, 8, 16),),
        zero=32,
        scale_zero=128,
    ),
    BlockType("IQ4_NL", 32, (Plane(2, 4, 16),), scale_at=0, table=IQ4_TABLE),
    BlockType(
        "IQ4_XS",
        256,
        (Plane(8, 4, 16),),
        scale_at=0,
        scales=(Plane(4, 4, 1), Plane(2, 2, 1)),
        scale_zero=32,
        table=IQ4_TABLE,
    ),
)
TYPES: dict[str, BlockType] = {kind.name: kind for kind in _ALL}
