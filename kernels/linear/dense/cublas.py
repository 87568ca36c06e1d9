"""Torch's own matmul, for weights that are not quantized and many tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.kernels.linear.dense.weight import HalfWeight
from quantkit.kernels.linear.weight import Kernel


def matmul(x: Tensor, weight: HalfWeight, *, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """y [tokens, outputs] in x's dtype, which must be the weight's."""
    if out is None:
        return torch.nn.functional.linear(x, weight.values, bias)
    if bias is None:
        return torch.mm(x, weight.values.mT, out=out)
    return torch.addmm(bias, x, weight.values.mT, out=out)


KERNEL = Kernel("cublas", matmul)
