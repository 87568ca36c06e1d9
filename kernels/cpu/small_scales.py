"""Groups whose own scales are small whole numbers below an outer one that several share, as in K-quants.

A block of x is as long as they are together, if it has one digit: sums are multiplied with small scales as whole
numbers, and become floats at its end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quantkit.kernels.cpu.floats import load_floats
from quantkit.kernels.cpu.language import F32, I8, I32, Code, Value, Variable
from quantkit.kernels.cpu.product_kind import Arguments, Kind

Outer = tuple[Value | None, Value | None]  # scales and lows that several groups share


def outer_of(code: Code, held: Arguments, kind: Kind, place: Value) -> Outer:
    """Scales and lows that several groups share, in 16 bits."""
    if kind.every == 1:
        return None, None
    scales = load_floats(code, torch.float16, kind.rows, held.outer_scales, place)
    return scales, load_floats(code, torch.float16, kind.rows, held.outer_lows, place) if kind.lows else None


class WholeSums(NamedTuple):
    """Of one token: products times small scales, and its own sums times small lows."""

    products: Variable
    lows: Variable | None

    @classmethod
    def begun(cls, code: Code, kind: Kind) -> WholeSums:
        none = code.constant(I32.x(kind.rows), 0)
        return cls(code.variable(none), code.variable(none) if kind.lows else None)

    def add(self, part: Value, of_x: Value, small: Outer) -> None:
        """Of one group, with its small scales and lows."""
        scales, lows = small
        assert scales is not None
        self.products.set(self.products.get() + part * scales)
        if self.lows is not None and lows is not None:
            self.lows.set(self.lows.get() + lows * of_x.splat(lows.type.lanes))

    def scaled(self, code: Code, kind: Kind, total: Value, outer: Outer, scale: Value) -> Value:
        """The same as floats, beside what was there."""
        scales, lows = outer
        assert scales is not None
        total = code.fma(self.products.get().to(F32), scales * (scale * kind.unit).splat(kind.rows), total)
        if self.lows is None or lows is None:
            return total
        return code.fma(self.lows.get().to(F32), lows * scale.splat(kind.rows), total)


def small_of(code: Code, held: Arguments, kind: Kind, place: Value) -> Outer:
    """Scales and lows of a group, whole numbers."""
    scales = code.load(I8.x(kind.rows), held.scales, place).to(I32)
    return scales, code.load(I8.x(kind.rows), held.lows, place).to(I32) if kind.lows else None
