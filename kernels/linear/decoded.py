"""Weights that no kernel takes: the meaning in `reference/linear.py` runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CtFloat8, Format, QuantizedWeight
from quantkit.kernels.card import Card
from quantkit.kernels.checks import HALVES
from quantkit.kernels.linear.weight import Choice, Kernel, Untuned, by_name
from quantkit.kernels.reference import linear as reference


@dataclass(frozen=True)
class DecodedWeight(Untuned):
    """Decoded anew for every call. `why` says what stands in the way of a kernel."""

    fmt: Format
    quantized: QuantizedWeight
    why: str

    @property
    def outputs(self) -> int:
        return self.quantized.shape[0]

    @property
    def inputs(self) -> int:
        return self.quantized.shape[1]

    @property
    def device(self) -> torch.device:
        return device_of(self.quantized)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in vars(self.quantized).values() if isinstance(part, Tensor))

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        return _KERNELS

    def default(self, tokens: int, processors: int, dtype: torch.dtype = torch.bfloat16) -> Choice:
        return Choice(KERNEL.name, None, self.why)


def matmul(x: Tensor, weight: DecodedWeight, *, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """y [tokens, outputs] in x's dtype."""
    if x.ndim != 2 or x.shape[1] != weight.inputs:
        raise InputError(f"linear: x has shape {list(x.shape)}, but must be [any, {weight.inputs}]")
    if x.dtype not in (*HALVES, torch.float32):
        raise InputError(f"linear: x is {str(x.dtype)[6:]}, but must be bfloat16, float16, float32")
    y = reference.linear(x, weight.fmt, weight.quantized, bias)
    return y if out is None else out.copy_(y)


def why_card_decodes(fmt: Format, card: Card) -> str | None:
    """Why a GPU cannot multiply what a format stores, whatever the layer; None where it can."""
    if isinstance(fmt, CtFloat8) and not card.has_float8:
        return f"{card.name} has no FP8, which begins with compute capability 8.9"
    return None


def device_of(quantized: QuantizedWeight) -> torch.device:
    return next(value.device for value in vars(quantized).values() if isinstance(value, Tensor))


KERNEL = Kernel("decode and multiply", matmul)
_KERNELS = by_name(KERNEL)
