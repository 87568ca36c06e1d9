"""Weights in GGUF blocks for the weight-only kernels: symmetric integers with a scale for every group.

Codes of 2, 3, 4 and 8 bits are taken as they are, those of 5 and 6 as 8. The places of IQ4's table become its values,
which are whole numbers of 8 bits. Scales are products of two numbers of the file, exact in float32.

Types with minimums have a second, small product. With `middle` the code in the middle and `low` what is added to every
weight of a group,

    weight = scale * code + low = scale * (code - middle) + (low + scale * middle)

so the sums of x over groups are multiplied with the last term, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from quantkit.formats import GgufWeight, IntegerWeight
from quantkit.formats.gguf.weight import table_of
from quantkit.formats.integer import middle_code
from quantkit.kernels.card import Card
from quantkit.kernels.linear.dispatch import choose
from quantkit.kernels.linear.weight import Choice, Kernel, LinearWeight, Untuned, by_name
from quantkit.kernels.linear.weight_only import weight as weight_only
from quantkit.kernels.linear.weight_only.weight import PackedWeight

_BYTES = 8  # bits of codes that have no kernel of their own


@dataclass(frozen=True)
class WeightWithLows(Untuned):
    """Packed codes, and what is added to the weights of every group."""

    packed: PackedWeight
    lows: Tensor  # float32 [groups, outputs]

    @property
    def outputs(self) -> int:
        return self.packed.outputs

    @property
    def inputs(self) -> int:
        return self.packed.inputs

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.lows.nbytes

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        return _KERNELS

    def default(self, tokens: int, card: Card, dtype: torch.dtype = torch.bfloat16) -> Choice:
        return Choice(KERNEL.name, None, "codes by the weight-only kernels, minimums by a small product")

    def join(self, others: Sequence[LinearWeight]) -> Self | None:
        alike = [weight for weight in others if isinstance(weight, WeightWithLows)]
        packed = self.packed.join([weight.packed for weight in alike]) if len(alike) == len(others) else None
        if packed is None:
            return None
        return replace(self, packed=packed, lows=torch.cat([self.lows, *(weight.lows for weight in alike)], 1))


def why_not(weight: GgufWeight) -> str | None:
    """Why the weight-only kernels cannot take this weight; None when they can."""
    return weight_only.why_not(_integers(weight))


def why_not_packed(weight: GgufWeight) -> str | None:
    """The same of kernels that take codes and scales alone."""
    if weight.kind.has_mins:
        return f"{weight.kind.name} has minimums beside its codes"
    return why_not(weight)


def lay_out_packed(weight: GgufWeight) -> PackedWeight:
    """Codes and scales of any type, without its minimums."""
    return weight_only.lay_out(_integers(weight))


def lay_out(weight: GgufWeight) -> PackedWeight | WeightWithLows:
    """In the order of the kernels, on the device where its codes are."""
    lows, packed = weight.group_lows, lay_out_packed(weight)
    if lows is None:
        return packed
    return WeightWithLows(packed, (lows + weight.group_scales * _middle(weight)).T.contiguous())


def _integers(weight: GgufWeight) -> IntegerWeight:
    """The weight without its minimums, around the middle code."""
    kind, codes, bits = weight.kind, weight.codes, weight.kind.bits
    if kind.table:
        values = (table_of(kind) + middle_code(_BYTES)).to(torch.uint8)
        codes, bits = values.to(codes.device)[codes.int()], _BYTES
    elif bits not in (2, 3, 4, 8):
        codes, bits = codes + (middle_code(_BYTES) - _middle(weight)), _BYTES
    scales = weight.scale if weight.scales is None else weight.group_scales
    zeros = torch.full(scales.shape, middle_code(bits), dtype=torch.uint8, device=codes.device)
    return IntegerWeight(codes, scales, zeros, bits, weight.group)


def _middle(weight: GgufWeight) -> int:
    """The code that stands for 0, beside the lows where there are some."""
    return middle_code(weight.kind.bits) if weight.kind.has_mins else weight.kind.zero


def matmul(x: Tensor, weight: WeightWithLows, *, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """y [tokens, outputs] in x's dtype."""
    choice = choose(weight.packed, x.shape[0], dtype=x.dtype)
    y = weight.packed.kernels[choice.kernel].run(x, weight.packed, choice.config, bias, out)
    sums = x.float().unflatten(1, (weight.lows.shape[0], -1)).sum(-1)  # [tokens, groups]
    return y.copy_(torch.addmm(y.float(), sums, weight.lows))


KERNEL = Kernel("weight-only with minimums", matmul)
_KERNELS = by_name(KERNEL)
