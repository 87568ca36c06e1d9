"""Numbers as two digits of a byte each, for the integer matrix units: finer than bfloat16 has them, but for what is far
below the largest of a group."""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.linear.dot import dot

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to whole numbers, halves to even
_LARGEST = tl.constexpr(127.0 * 256.0)  # whole number, so that 127 is the largest high digit


@triton.jit
def two_digits(value, AXIS: tl.constexpr):
    """(high, low, step, sum): a float32 value is (256 high + low) * step, in int8; each group along AXIS has its step
    and the sum of its whole numbers. The step is NaN where one of the group is not finite."""
    largest = tl.max(tl.abs(value), axis=AXIS)
    inverse = _LARGEST / tl.where(largest > 0, largest, 1.0)
    whole = ((value * tl.expand_dims(inverse, AXIS) + ROUND) - ROUND).to(tl.int32)
    high = (whole + 128) >> 8
    low = whole - high * 256
    strange = tl.sum(value * 0.0, axis=AXIS)  # what is not finite must not become an ordinary number
    return high.to(tl.int8), low.to(tl.int8), largest / _LARGEST + strange, tl.sum(whole, axis=AXIS)


@triton.jit
def times_digits(codes, high, low, INTERPRET: tl.constexpr):
    """codes @ (256 high + low) of int8, exactly: int32. The interpreter, which multiplies floats, is exact up to 1,024
    inputs."""
    return dot(codes, high, INTERPRET).to(tl.int32) * 256 + dot(codes, low, INTERPRET).to(tl.int32)
