"""A token's probability as two integers, so that sums are exact and do not depend on their order.

    distance   how far its logit is below the largest, over the temperature, in steps of 2**-26: equal distances are
               equal probabilities to float32's precision, and small distances come first in the order of tokens
    weight     2**38 * exp(-distance), rounded; 0 from a distance of 28 on: such a token is never drawn

A weight is held as a high and a low half, whole numbers of 32 bits, weight = high * 2**19 + low. A program adds up the
halves of up to 4096 tokens in 32 bits and joins their sums once: additions of 64 bits are two instructions, and a
conversion to 64 bits has an eighth of their rate.
"""

from __future__ import annotations

import triton
import triton.language as tl

PART = 4096  # tokens of the vocabulary per program; no more, or the sums of halves overflow

LIMIT = tl.constexpr(28 << 26)  # the largest distance; its weight is 0
STEPS = tl.constexpr(67108864.0)  # 2**26, of distance 1
ONE = tl.constexpr(274877906944.0)  # 2**38, the weight of the most probable token
_LOG2_E_A_STEP = tl.constexpr(1.4426950408889634 / 67108864.0)
_HALF = tl.constexpr(524288.0)  # 2**19
_TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number, in the low bits of the float
_TO_WHOLE_BITS = tl.constexpr(0x4B400000)


@triton.jit
def gap_of(x, top, temperature):
    """The distance before it is made whole, float32; inf for a banned token, and where a masked load fills in -inf."""
    temperature = tl.maximum(temperature, 1e-6)
    return (top - x) * tl.div_rn(temperature * 0.0 + STEPS, temperature)


@triton.jit
def distance_of(x, top, temperature):
    """int32, at most `LIMIT`."""
    return tl.minimum(gap_of(x, top, temperature), LIMIT * 1.0).to(tl.int32)


@triton.jit
def share_of(gap):
    """exp(-gap), float32."""
    return tl.exp2(gap * -_LOG2_E_A_STEP)


@triton.jit
def halves_of(distance):
    """The high half of the weight, uint32 up to 2**19, and the low one, int32 from -2**18 to 2**18."""
    scaled = share_of(distance.to(tl.float32)) * _HALF
    rounded = scaled + _TO_WHOLE
    rest = (scaled - (rounded - _TO_WHOLE)) * _HALF + _TO_WHOLE
    return rounded.to(tl.uint32, bitcast=True) - _TO_WHOLE_BITS, rest.to(tl.int32, bitcast=True) - _TO_WHOLE_BITS


@triton.jit
def joined(high, low):
    """int64, of halves or of their sums over up to 4096 tokens: high ones may reach 4096 * 2**19 = 2**31."""
    return high.to(tl.int64) * 524288 + low.to(tl.int64)


@triton.jit
def weight_of(distance):
    high, low = halves_of(distance)
    return joined(high, low)
