"""A weight that is not quantized, as its kernel reads it: 16 bit, as stored, and the tickets that splits take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.kernels.checks import HALVES
from quantkit.kernels.linear.weight_only.packed import TICKETS


@dataclass(frozen=True)
class HalfWeight:
    """`values` is the layer's own tensor, not a copy of it."""

    values: Tensor  # bfloat16 or float16 [outputs, inputs], contiguous
    tickets: Tensor  # int32, zero between calls

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return 2 * self.values.numel()


def supports(weight: Tensor) -> bool:
    """Whether the kernel takes this weight; others are torch's."""
    return weight.dtype in HALVES and weight.ndim == 2 and weight.is_contiguous() and weight.numel() > 0


def pack(weight: Tensor) -> HalfWeight:
    return HalfWeight(weight, torch.zeros(TICKETS, dtype=torch.int32, device=weight.device))


def torch_matmul(x: Tensor, weight: HalfWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """By cuBLAS."""
    if out is None:
        return torch.nn.functional.linear(x, weight.values, bias)
    if bias is None:
        return torch.mm(x, weight.values.mT, out=out)
    return torch.addmm(bias, x, weight.values.mT, out=out)
