"""How far a result is from the exact one: the measure that tests and benchmarks share."""

from __future__ import annotations

from torch import Tensor

LARGEST_ERROR = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}  # relative, of a kernel with inputs of this dtype
ROUNDED_INPUTS = 1e-2  # the same where it rounds its inputs to 8 bits, as CPUs do for many tokens of 16 bits
FLOAT8_STEPS = 6e-2  # the same against inputs in float8 alone, where a kernel rounds weights to it, too, or neither


def relative_error(result: Tensor, exact: Tensor) -> float:
    """|result - exact| / |exact| over all elements, in float64; NaN where the result is not finite."""
    return float((result.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-300))
