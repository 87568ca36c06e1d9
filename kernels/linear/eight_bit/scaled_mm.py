"""FP8 matmul by torch's own kernel, which is best for many tokens: float8 e4m3 for both operands, float32 sums.

Layout   as in `weight.py`. A scale per token and one per output; or, on Hopper, a scale for every 128 inputs of a
         token and one for every 128 x 128 weights (cuBLAS of CUDA 12.9 and later)
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.card import card_of, runs_kernels
from quantkit.kernels.linear.arguments import check_arguments
from quantkit.kernels.linear.eight_bit.quantize_rows import quantize_rows
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.weight import Kernel

_FIRST_CUDA_WITH_BLOCKS = (12, 9)
_BLOCK_TOKENS = 16  # cuBLAS refuses 33 and 1,021 tokens with scales of blocks


def supports(weight: EightBitWeight, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Tokens in bfloat16; compute capability 8.9 and up for scales of rows, 9.0 for scales of blocks."""
    if weight.code_type != "fp8" or not runs_kernels(weight.device) or dtype != torch.bfloat16:
        return False
    card = card_of(weight.device)
    if weight.scales.ndim == 1:
        return weight.activations == "token" and card.has_float8
    aligned = weight.scales.shape[1] % 4 == 0  # cuBLAS wants rows of scales to begin at multiples of 16 bytes
    here = card.has_warpgroups and _cuda_version() >= _FIRST_CUDA_WITH_BLOCKS
    return weight.activations == "block" and aligned and here


def matmul(x: Tensor, weight: EightBitWeight, *, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """y [tokens, outputs] in x's dtype, which must be bfloat16."""
    check_arguments("scaled matmul", x, weight, bias, out)
    if not supports(weight, x.dtype):
        raise InputError(
            "torch's scaled matmul takes bfloat16 tokens and float8 weights with scales of rows, or of blocks on Hopper"
        )
    if x.shape[0] == 0:
        return x.new_empty(0, weight.outputs) if out is None else out
    tokens, blocks = x.shape[0], weight.scales.ndim == 2
    if blocks and tokens % _BLOCK_TOKENS:
        x = torch.nn.functional.pad(x, (0, 0, 0, -tokens % _BLOCK_TOKENS))
    rows = quantize_rows(x, weight)
    y = torch._scaled_mm(
        rows.codes,
        weight.values.mT,
        scale_a=rows.scales if blocks else rows.scales.flatten()[:, None],  # whose strides torch checks
        scale_b=weight.scales.mT if blocks else weight.scales.view(1, -1),
        bias=None if bias is None or blocks else torch.nn.functional.pad(bias, (0, weight.rows - weight.outputs)),
        out_dtype=x.dtype,
    )[:tokens, : weight.outputs]
    if blocks and bias is not None:
        y = y + bias
    return y if out is None else out.copy_(y)


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))


KERNEL = Kernel("scaled_mm", matmul, supports=supports)
