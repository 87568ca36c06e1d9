"""One linear layer of any format: `prepare` its weight once, then call `linear`.

    weight = prepare(fmt, fmt.unpack(parts), dtype)
    y = linear(x, weight, bias)

On a GPU the weight is laid out for the kernels and `dispatch.py` picks one by the number of tokens; on a CPU `cpu.py`
takes it. Where neither fits, the meaning in `reference/linear.py` runs, and `explain` says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CtFloat8, CtInt8, Format, LlmInt8, QuantizedWeight
from quantkit.kernels.checks import HALVES
from quantkit.kernels.linear import cpu
from quantkit.kernels.linear.cpu import CpuWeight
from quantkit.kernels.linear.dense import weight as half_weight
from quantkit.kernels.linear.dense.weight import HalfWeight
from quantkit.kernels.linear.eight_bit import weight as eight_bit
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.weight_only import packed
from quantkit.kernels.linear.weight_only.packed import PackedWeight
from quantkit.kernels.reference import linear as reference

if TYPE_CHECKING:  # needs Triton, which a machine without a GPU may not have
    from quantkit.kernels.linear.dispatch import Choice


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


LinearWeight = PackedWeight | EightBitWeight | HalfWeight | CpuWeight | DecodedWeight


def prepare(fmt: Format, quantized: QuantizedWeight, dtype: torch.dtype = torch.bfloat16) -> LinearWeight:
    """The weight as the kernels of its device want it, for activations of this dtype."""
    device = device_of(quantized)
    if device.type != "cuda":
        prepared = cpu.pack(fmt, quantized, dtype)
        return prepared or DecodedWeight(fmt, quantized, str(cpu.why_not(quantized)))
    if isinstance(fmt, LlmInt8 | CtInt8 | CtFloat8):
        return eight_bit.pack(fmt, quantized)
    why_not = packed.supports(quantized)
    return DecodedWeight(fmt, quantized, why_not) if why_not else packed.pack(quantized)


def prepare_plain(weight: Tensor) -> HalfWeight | None:
    """The same for a weight that is not quantized, which is not copied; None where it is torch's: a CPU, float32."""
    return half_weight.pack(weight) if weight.is_cuda and half_weight.supports(weight) else None


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """y [tokens, outputs] = x [tokens, inputs] @ weight.T + bias in x's dtype."""
    if isinstance(weight, DecodedWeight):
        return _decoded(x, weight, bias, out)
    if isinstance(weight, CpuWeight):
        return cpu.matmul(x, weight, bias, out)
    from quantkit.kernels.linear.dispatch import choose

    return run(choose(weight, x.shape[0] if x.ndim == 2 else 0, dtype=x.dtype), x, weight, bias, out)


def run(
    choice: Choice,
    x: Tensor,
    weight: PackedWeight | EightBitWeight | HalfWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One call of a given choice."""
    from quantkit.kernels.linear.dense import half
    from quantkit.kernels.linear.eight_bit import matmul as eight_bit_matmul
    from quantkit.kernels.linear.eight_bit import scaled_mm
    from quantkit.kernels.linear.weight_only import hopper, skinny, wide

    if isinstance(weight, HalfWeight):
        if choice.kernel == "cublas":
            return half_weight.torch_matmul(x, weight, bias, out)
        return half.matmul(x, weight, choice.config, bias=bias, out=out)  # type: ignore[arg-type]
    if isinstance(weight, PackedWeight):
        if choice.kernel == "dequantize":
            return wide.matmul(x, weight, bias=bias, out=out)
        if choice.kernel == "hopper":
            return hopper.matmul(x, weight, choice.config, bias=bias, out=out)  # type: ignore[arg-type]
        return skinny.matmul(x, weight, choice.config, bias=bias, out=out)  # type: ignore[arg-type]
    if choice.kernel == "scaled_mm":
        return scaled_mm.matmul(x, weight, bias=bias, out=out)
    return eight_bit_matmul.matmul(x, weight, choice.config, bias=bias, out=out)  # type: ignore[arg-type]


def explain(weight: LinearWeight, tokens: int) -> str:
    """Which kernel `linear` would take, and why, in one line."""
    if isinstance(weight, DecodedWeight):
        return f"decode and multiply: {weight.why}"
    if isinstance(weight, CpuWeight):
        return f"{cpu.choose(weight, tokens)}: on the CPU, {tokens} tokens"
    from quantkit.kernels.linear.dispatch import choose

    choice = choose(weight, tokens)
    return f"{choice.kernel} {choice.config or ''}: {choice.why}"


def _decoded(x: Tensor, weight: DecodedWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if x.ndim != 2 or x.shape[1] != weight.inputs:
        raise InputError(f"linear: x has shape {list(x.shape)}, but must be [any, {weight.inputs}]")
    if x.dtype not in (*HALVES, torch.float32):
        raise InputError(f"linear: x is {str(x.dtype)[6:]}, but must be bfloat16, float16, float32")
    y = reference.linear(x, weight.fmt, weight.quantized, bias)
    return y if out is None else out.copy_(y)


def device_of(quantized: QuantizedWeight) -> torch.device:
    return next(value.device for value in vars(quantized).values() if isinstance(value, Tensor))
