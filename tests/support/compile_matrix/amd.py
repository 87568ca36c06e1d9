"""AMD's GPUs, to see what compiles for them (docs/reference/amd.md). Nothing was ever run there.

They have none of the instructions that `Card` knows: no chained launches, no warp groups, no 8-bit floats that mean the
same (MI300's have another exponent).
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.kernels.card import Card


@dataclass(frozen=True)
class AmdCard(Card):
    architecture: str
    warp: int

    @property
    def target(self) -> str:
        return self.architecture


AMD = {
    "gfx942": AmdCard("MI300X", (0, 0), 304, 64 << 10, 64 << 10, 5300e9, "gfx942", 64),
    "gfx1100": AmdCard("RX 7900 XTX", (0, 0), 96, 64 << 10, 64 << 10, 960e9, "gfx1100", 32),
}
