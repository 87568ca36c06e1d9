"""What the linear kernels mean, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats import Format, QuantizedWeight


def linear(x: Tensor, fmt: Format, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x [tokens, inputs] times the decoded weight, as a server of this format computes it, in x's dtype.

    Formats that round activations too see them through `Format.served_inputs`.
    """
    served = fmt.served_inputs(x, weight) if fmt.input_rounding else x
    return torch.nn.functional.linear(served, weight.dequantize(x.dtype), bias)


def exact(x: Tensor, fmt: Format, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """The same without any rounding of its own: the number that errors are measured against, in float64."""
    served = fmt.served_inputs(x.float(), weight) if fmt.input_rounding else x
    result = served.double() @ weight.dequantize(torch.float32).double().mT
    return result if bias is None else result + bias.double()
