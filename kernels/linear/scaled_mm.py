"""FP8 matmul by torch's own kernel, which is best for many tokens: one scale per token, one per output.

Layout   as in `eight_bit.py`, activations per token; float8 e4m3 for both operands, float32 sums
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.linear.arguments import check_arguments
from quantkit.kernels.linear.eight_bit import EightBitWeight
from quantkit.kernels.linear.quantize_rows import quantize_rows


def supports(weight: EightBitWeight) -> bool:
    """Compute capability 8.9 and up, a scale per row of both sides, bfloat16 results."""
    fits = weight.kind == "fp8" and weight.activations == "token" and weight.scales.ndim == 1
    return fits and weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) >= (8, 9)


def matmul(x: Tensor, weight: EightBitWeight, *, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """y [tokens, outputs] in x's dtype, which must be bfloat16."""
    check_arguments("scaled matmul", x, weight, bias, out)
    if not supports(weight) or x.dtype != torch.bfloat16:
        raise InputError("torch's scaled matmul takes float8 weights and bfloat16 tokens with a scale per row only")
    if x.shape[0] == 0:
        return x.new_empty(0, weight.outputs) if out is None else out
    rows = quantize_rows(x, weight)
    y = torch._scaled_mm(
        rows.codes,
        weight.values.mT,
        scale_a=rows.scales,
        scale_b=weight.scales.view(1, -1),
        bias=None if bias is None else torch.nn.functional.pad(bias, (0, weight.rows - weight.outputs)),
        out_dtype=x.dtype,
    )[:, : weight.outputs]
    return y if out is None else out.copy_(y)
