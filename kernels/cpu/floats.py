"""Floats of 16 and 32 bits in memory, float32 in registers."""

from __future__ import annotations

import torch

from quantkit.kernels.cpu.language import F16, F32, I16, I32, Code, Value

BYTES = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}


def load_floats(code: Code, dtype: torch.dtype, lanes: int, address: Value, place: Value | int = 0) -> Value:
    if dtype == torch.bfloat16:
        return upper_halves(code, code.load(I16.x(lanes), address, place))
    return code.load((F16 if dtype == torch.float16 else F32).x(lanes), address, place).to(F32)


def upper_halves(code: Code, halves: Value) -> Value:
    """Float32 of which these 16 bits are the first, and zeros the rest.

    ARM has one unit that shifts, and two that put lanes together.
    """
    lanes = halves.type.lanes
    if not code.processor.is_arm or lanes == 1:
        return (halves.to(I32, signed=False) << 16).view(F32.x(lanes))
    both = code.join([code.constant(halves.type, 0), halves])
    pairs = [place for lane in range(lanes) for place in (lane, lanes + lane)]
    return both.pick(pairs).view(F32.x(lanes))


def to_stored(code: Code, dtype: torch.dtype, values: Value) -> Value:
    """Rounded to nearest, ties to even; what is not a number stays none."""
    if dtype != torch.bfloat16:
        return values.to(F16 if dtype == torch.float16 else F32)
    bits = values.view(I32.x(values.type.lanes))
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    number = values.equals(values)
    kept = code.select(number, rounded >> 16, code.constant(bits.type, 0x7FC0))
    return kept.to(I16)


def store_floats(code: Code, dtype: torch.dtype, values: Value, address: Value, place: Value | int = 0) -> None:
    code.store(to_stored(code, dtype, values), address, place)


def rounded(code: Code, dtype: torch.dtype, values: Value) -> Value:
    """As it would be after a store and a load."""
    if dtype == torch.float32:
        return values
    stored = to_stored(code, dtype, values)
    return stored.to(F32) if dtype == torch.float16 else (stored.to(I32, signed=False) << 16).view(values.type)


def size_of(values: Value) -> Value:
    """Bits of float32 without their signs: whole numbers in the order of sizes, of which NaN is the largest."""
    return values.view(I32.x(values.type.lanes)) & 0x7FFFFFFF
