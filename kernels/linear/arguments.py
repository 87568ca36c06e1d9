"""What every matmul of a linear layer asks of its arguments, said before anything is launched."""

from __future__ import annotations

from torch import Tensor

from quantkit.kernels.checks import HALVES, check_dtype, check_rows, check_same_device, check_shape
from quantkit.kernels.linear.weight import LinearWeight


def check_arguments(kernel: str, x: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor | None) -> None:
    """x [tokens, inputs] in 16 bit, bias [outputs], out [tokens, outputs] in x's dtype, all on the weight's device."""
    check_shape(kernel, "x", x, (None, weight.inputs))
    check_dtype(kernel, "x", x, HALVES)
    check_rows(kernel, "x", x)
    check_same_device(kernel, x=x, weight=weight.device, bias=bias, out=out)
    if bias is not None:
        check_shape(kernel, "bias", bias, (weight.outputs,))
        check_rows(kernel, "bias", bias)
    if out is not None:
        check_shape(kernel, "out", out, (x.shape[0], weight.outputs))
        check_dtype(kernel, "out", out, (x.dtype,))
        check_rows(kernel, "out", out)
