"""Linear layers on a CPU from weights of floats as they are stored, in 16 or 8 bits, for few tokens.

More tokens are multiplied in slabs of float32 (`slabs.py`): from there on torch's product of matrices is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats import Float8Weight, Format, QuantizedWeight
from quantkit.kernels.checks import HALVES
from quantkit.kernels.cpu import installed

MOST_TOKENS = 16
_AT_ONCE = (1, 2, 4)  # tokens


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel multiplies x with a plain weight, which may be in fewer bits than x."""
    return (
        x.shape[0] <= MOST_TOKENS
        and weight.dtype in HALVES
        and x.is_cpu
        and installed.can_compile()
        and weight.is_contiguous()
        and x.numel() > 0
    )


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
    """y [tokens, outputs] = x @ weight.T + bias in x's dtype, for what it `takes`, rows of y contiguous."""
    from quantkit.kernels.cpu.widening import widened

    _run(widened(x), None, weight, None, bias, y)
    return y


def multiply_float8(
    x: Tensor, fmt: Format, given: QuantizedWeight | None, codes: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    """The same into y, rows of x contiguous, with codes uint8 [outputs, inputs] of float8 and their scales float32
    [outputs, groups]. x is rounded as the format says, by the scale of the weight where it is given one."""
    from quantkit.kernels.cpu.float8 import RAISED, round_tokens
    from quantkit.kernels.cpu.widening import widened

    x_scales: Tensor | None = None
    if fmt.input_rounding is None:
        x = widened(x, RAISED)
    else:
        x, x_scales = round_tokens(x, scales.shape[1], _input_scale(given))
    _run(x, x_scales, codes.view(torch.float8_e4m3fn), scales, bias, y)


def _input_scale(given: QuantizedWeight | None) -> float | None:
    return float(given.input_scale) if isinstance(given, Float8Weight) and given.input_scale is not None else None


def _run(
    x: Tensor, x_scales: Tensor | None, weight: Tensor, scales: Tensor | None, bias: Tensor | None, y: Tensor
) -> None:
    from quantkit.kernels.cpu.float_product import Kind, kernel, pieces
    from quantkit.kernels.cpu.pool import shared_pool

    pool, (tokens, outputs), inputs = shared_pool(), y.shape, weight.shape[1]
    together = max(count for count in _AT_ONCE if count <= tokens)
    kind = Kind(weight.dtype, y.dtype, together, x_scales is not None)
    each, count = pieces(kind, outputs, pool.threads)
    groups = 1 if scales is None else scales.shape[1]
    addresses = [_address(part) for part in (weight, scales, x, x_scales, bias, y)]
    pool.run(kernel(kind), [*addresses, y.stride(0), tokens, outputs, inputs, groups, each], count)


def _address(part: Tensor | None) -> int:
    return 0 if part is None else part.data_ptr()
