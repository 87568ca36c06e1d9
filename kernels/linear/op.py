"""One linear layer of any format: `prepare` its weight once, then call `linear`.

    weight = prepare(fmt, fmt.unpack(parts), device)
    y = linear(x, weight, bias)

On a GPU the weight is laid out for the kernels and `dispatch.py` picks one by the number of tokens. Where no kernel
fits (`prepare` says why in `weight.why`), and on a CPU, the meaning in `reference/linear.py` runs instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CodebookWeight, CtFloat8, CtInt8, Format, IntegerWeight, LlmInt8, QuantizedWeight
from quantkit.kernels.checks import HALVES
from quantkit.kernels.linear import eight_bit, packed
from quantkit.kernels.linear.dispatch import Choice, choose
from quantkit.kernels.linear.eight_bit import EightBitWeight
from quantkit.kernels.linear.packed import PackedWeight
from quantkit.kernels.reference import linear as reference


@dataclass(frozen=True)
class DecodedWeight:
    """A weight that no kernel takes: decoded anew for every call. `why` says what stands in the way."""

    fmt: Format
    quantized: QuantizedWeight
    why: str

    @property
    def outputs(self) -> int:
        return self.quantized.shape[0]

    @property
    def inputs(self) -> int:
        return self.quantized.shape[1]


LinearWeight = PackedWeight | EightBitWeight | DecodedWeight


def prepare(fmt: Format, quantized: QuantizedWeight, *, kernels: bool | None = None) -> LinearWeight:
    """The weight as the kernels want it, on the device where it is. `kernels` False forces the plain meaning."""
    device = _device_of(quantized)
    if kernels is None:
        kernels = device.type == "cuda"
    if not kernels:
        return DecodedWeight(fmt, quantized, f"kernels run on GPUs, the weight is on {device}")
    if isinstance(fmt, LlmInt8 | CtInt8 | CtFloat8):
        return eight_bit.pack(fmt, quantized)
    why_not = packed.supports(quantized)
    return DecodedWeight(fmt, quantized, why_not) if why_not else packed.pack(quantized)


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """y [tokens, outputs] = x [tokens, inputs] @ weight.T + bias in x's dtype."""
    if isinstance(weight, DecodedWeight):
        return _decoded(x, weight, bias, out)
    choice = choose(weight, x.shape[0] if x.ndim == 2 else 0)
    return run(choice, x, weight, bias, out)


def run(
    choice: Choice,
    x: Tensor,
    weight: PackedWeight | EightBitWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One call of a given choice."""
    from quantkit.kernels.linear import eight_bit_matmul, scaled_mm, skinny, wide

    if isinstance(weight, PackedWeight):
        if choice.kernel == "dequantize":
            return wide.matmul(x, weight, bias=bias, out=out)
        return skinny.matmul(x, weight, choice.config, bias=bias, out=out)  # type: ignore[arg-type]
    if choice.kernel == "scaled_mm":
        return scaled_mm.matmul(x, weight, bias=bias, out=out)
    return eight_bit_matmul.matmul(x, weight, choice.config, bias=bias, out=out)  # type: ignore[arg-type]


def explain(weight: LinearWeight, tokens: int) -> str:
    """Which kernel `linear` would take, and why, in one line."""
    if isinstance(weight, DecodedWeight):
        return f"decode and multiply: {weight.why}"
    choice = choose(weight, tokens)
    return f"{choice.kernel} {choice.config or ''}: {choice.why}"


def _decoded(x: Tensor, weight: DecodedWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if x.ndim != 2 or x.shape[1] != weight.inputs:
        raise InputError(f"linear: x has shape {list(x.shape)}, but must be [any, {weight.inputs}]")
    if x.dtype not in (*HALVES, torch.float32):
        raise InputError(f"linear: x is {str(x.dtype)[6:]}, but must be bfloat16, float16, float32")
    y = reference.linear(x, weight.fmt, weight.quantized, bias)
    return y if out is None else out.copy_(y)


def _device_of(quantized: QuantizedWeight) -> torch.device:
    codes = (
        quantized.codes
        if isinstance(quantized, IntegerWeight | CodebookWeight)
        else next(value for value in vars(quantized).values() if isinstance(value, Tensor))
    )
    return codes.device
