"""Linear layers on a CPU from weights of floats as they are stored, in 16 or 8 bits, for few tokens.

For more tokens torch's product of matrices is faster, of float32 in slabs (`slabs.py`), and of float8 that of panels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats import Float8Weight, Format, QuantizedWeight
from quantkit.kernels.checks import HALVES
from quantkit.kernels.cpu import installed

MOST_TOKENS = 16
_MOST_WIDENED = 48  # where torch would widen the weight, too
_MOST_BESIDE_PANELS = 4
_AT_ONCE = (1, 2, 4)  # tokens


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel multiplies x with a plain weight, which may be in fewer bits than x."""
    from quantkit.kernels.linear.cpu.slabs import product_dtype

    widened = not product_dtype(x.dtype) == x.dtype == weight.dtype
    return (
        x.shape[0] <= (_MOST_WIDENED if widened else MOST_TOKENS)
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


def takes_float8(x: Tensor, fmt: Format) -> bool:
    """Few tokens, and all of those that are multiplied in float16."""
    if not installed.can_compile():
        return False
    from quantkit.kernels.cpu import float8_product
    from quantkit.kernels.cpu.float8 import QUADS

    most = _MOST_BESIDE_PANELS if x.shape[1] % QUADS == 0 else MOST_TOKENS
    return x.shape[0] <= most or (fmt.input_rounding is not None and float8_product.fits(x.dtype))


def multiply_float8(
    x: Tensor, fmt: Format, given: QuantizedWeight | None, codes: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    """The same into y, for what it `takes_float8`, rows of x contiguous, with codes uint8 [outputs, inputs] of float8
    and their scales float32 [outputs, groups]. x is rounded as the format says, by the scale of the weight where it is
    given one."""
    from quantkit.kernels.cpu import float8_product
    from quantkit.kernels.cpu.float8 import raised, round_tokens

    x_scales: Tensor | None = None
    if fmt.input_rounding is None:
        x = raised(x)
    else:
        x, x_scales = round_tokens(x, scales.shape[1], _input_scale(given), halves=float8_product.fits(y.dtype))
    _run(x, x_scales, codes.view(torch.float8_e4m3fn), scales, bias, y)


def rounded(x: Tensor, given: QuantizedWeight | None, groups: int, *, raised: bool = False) -> Tensor:
    """Float32 of what x is in float8, by the scale of the weight where it is given one."""
    from quantkit.kernels.cpu.float8 import rounded_tokens

    return rounded_tokens(x, groups, _input_scale(given), raised=raised)


def _input_scale(given: QuantizedWeight | None) -> float | None:
    return float(given.input_scale) if isinstance(given, Float8Weight) and given.input_scale is not None else None


def _run(
    x: Tensor, x_scales: Tensor | None, weight: Tensor, scales: Tensor | None, bias: Tensor | None, y: Tensor
) -> None:
    from quantkit.kernels.cpu import float8_product, float_product
    from quantkit.kernels.cpu.pool import shared_pool
    from quantkit.kernels.cpu.processor import this_processor

    pool, (tokens, outputs), inputs = shared_pool(), y.shape, weight.shape[1]
    if x.dtype == torch.float16:
        halves = float8_product.kind_for(y.dtype, tokens)
        kernel, rows, shared = float8_product.kernel(halves), halves.rows, halves.shared
    else:
        together = max(count for count in _AT_ONCE if count <= tokens)
        kind = float_product.Kind(weight.dtype, y.dtype, together, x_scales is not None)
        kernel, rows, shared = float_product.kernel(kind), kind.rows(this_processor()), False
    each, count = float_product.pieces(outputs, pool.threads, rows)
    groups = 1 if scales is None else scales.shape[1]
    memory = torch.empty(count, rows, inputs, dtype=torch.float16) if shared else None
    addresses = [_address(part) for part in (weight, scales, x, x_scales, bias, y)]
    pool.run(kernel, [*addresses, y.stride(0), tokens, outputs, inputs, groups, each, _address(memory)], count)


def _address(part: Tensor | None) -> int:
    return 0 if part is None else part.data_ptr()
