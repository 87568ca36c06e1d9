"""One linear layer of any format: `prepare` its weight once, then call `linear`.

    weight = prepare(fmt, fmt.unpack(parts), dtype)
    y = linear(x, weight, bias)

On a GPU the weight is laid out for the kernels of its room, on a CPU for torch's own (`cpu.py`), and `dispatch.py`
picks one by the number of tokens. Where no kernel takes a weight, its meaning runs (`decoded.py`); `explain` says why.
`arithmetic.py` says which weights are multiplied in FP8 where tokens are many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats import Format, GgufWeight, QuantizedWeight
from quantkit.kernels.card import Card, card_of, runs_kernels
from quantkit.kernels.linear.arithmetic import meaning_of_few, multiplies_in_float8
from quantkit.kernels.linear.cpu import weight as cpu
from quantkit.kernels.linear.decoded import DecodedWeight, device_of, why_card_decodes
from quantkit.kernels.linear.dense import weight as dense
from quantkit.kernels.linear.dense.weight import HalfWeight
from quantkit.kernels.linear.dispatch import choose
from quantkit.kernels.linear.eight_bit import weight as eight_bit
from quantkit.kernels.linear.weight import Choice
from quantkit.kernels.linear.weight import LinearWeight as LinearWeight  # what callers hold
from quantkit.kernels.linear.weight_only import float8, gguf
from quantkit.kernels.linear.weight_only import weight as weight_only
from quantkit.kernels.linear.weight_only.weight import PackedWeight


def prepare(
    fmt: Format, quantized: QuantizedWeight, dtype: torch.dtype = torch.bfloat16, arithmetic: str | None = None
) -> LinearWeight:
    """The weight as the kernels of its device want it, for activations of this dtype."""
    weight = _prepare(*meaning_of_few(fmt, quantized, arithmetic), dtype)
    if not isinstance(weight, PackedWeight) or not card_of(weight.device).has_float8:
        return weight
    if not multiplies_in_float8(fmt, quantized, arithmetic):
        return weight
    return float8.lay_out(weight, quantized, copied=arithmetic == "fp8-copy")


def _prepare(fmt: Format, quantized: QuantizedWeight, dtype: torch.dtype) -> LinearWeight:
    if not runs_kernels(device_of(quantized)):
        prepared = cpu.lay_out(fmt, quantized, dtype)
        return prepared or DecodedWeight(fmt, quantized, str(cpu.why_not(quantized)))
    why_not = why_decoded(fmt, quantized, card_of(device_of(quantized)))
    if why_not:
        return DecodedWeight(fmt, quantized, why_not)
    if isinstance(quantized, GgufWeight):
        return gguf.lay_out(quantized)
    return eight_bit.lay_out(fmt, quantized) if eight_bit.takes(fmt) else weight_only.lay_out(quantized)


def why_decoded(fmt: Format, quantized: QuantizedWeight, card: Card) -> str | None:
    """Why no kernel of a GPU takes this weight; None where one does."""
    why_not = why_card_decodes(fmt, card)
    if why_not is None and isinstance(quantized, GgufWeight):
        return gguf.why_not(quantized)
    return why_not if why_not or eight_bit.takes(fmt) else weight_only.why_not(quantized)


def prepare_plain(weight: Tensor) -> HalfWeight | None:
    """The same for a weight that is not quantized, which is not copied; None where it is torch's: a CPU, float32."""
    return dense.lay_out(weight) if runs_kernels(weight.device) and dense.supports(weight) else None


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """y [tokens, outputs] = x [tokens, inputs] @ weight.T + bias in x's dtype."""
    return run(choose(weight, x.shape[0] if x.ndim == 2 else 0, dtype=x.dtype), x, weight, bias, out)


def run(
    choice: Choice, x: Tensor, weight: LinearWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """One call of a given choice."""
    return weight.kernels[choice.kernel].run(x, weight, choice.config, bias, out)


def explain(weight: LinearWeight, tokens: int) -> str:
    """Which kernel `linear` would take, and why, in one line."""
    choice = choose(weight, tokens)
    return f"{choice.kernel}{'' if choice.config is None else f' {choice.config}'}: {choice.why}"
