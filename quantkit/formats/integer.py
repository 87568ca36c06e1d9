"""Weights on a uniform integer grid: `weight = scale * (code - zero)`, one scale and zero point per group of inputs.

GPTQ, AWQ and compressed-tensors integers are layouts of this one idea; so they convert into each other without loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.errors import CannotHold, InputError
from quantkit.formats.base import DTYPES, Format, Index, QuantizedWeight, Shape, check_choice, check_divides
from quantkit.formats.engine_rules import VLLM_MARLIN, Refusal


@dataclass(frozen=True)
class IntegerWeight(QuantizedWeight):
    """Unsigned codes with their grid. Symmetric means that every zero point is the middle code 2**(bits-1)."""

    codes: Tensor  # uint8 [out, in], below 2**bits
    scales: Tensor  # float [out, groups]; a negative one turns its grid around, so that code 0 is the largest value
    zeros: Tensor  # uint8 [out, groups]
    bits: int
    group_size: int  # inputs per group; the last group may be short
    group_of: Tensor | None = None  # int32 [in], only where act-order scattered the groups

    @property
    def shape(self) -> Shape:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def symmetric(self) -> bool:
        return bool((self.zeros == middle_code(self.bits)).all())

    def input_groups(self) -> Tensor:
        """The group of every input column, int64 [in]."""
        if self.group_of is not None:
            return self.group_of.long()
        return contiguous_groups(self.shape[1], self.group_size, self.codes.device).long()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        scales, zeros = self.scales.float(), self.zeros.float()
        if self.group_of is None and self.shape[1] % self.group_size == 0:
            weight: Tensor = self.codes.float().unflatten(1, (-1, self.group_size))  # [out, groups, size]
            return weight.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1)).flatten(1).to(dtype)
        group = self.input_groups()
        return self.codes.float().sub_(zeros[:, group]).mul_(scales[:, group]).to(dtype)

    def cut(self, outputs: Index, inputs: Index) -> IntegerWeight:
        """Keeps the grids of groups that are left. Inputs that come group by group need no act-order any more."""
        codes = self.codes[outputs][:, inputs].contiguous()
        used, group = self.input_groups()[inputs].unique(return_inverse=True)
        size = codes.shape[1] if len(used) == 1 else self.group_size
        group = group.to(torch.int32)
        in_order = torch.equal(group, contiguous_groups(codes.shape[1], size, group.device))
        scales, zeros = (grid[outputs][:, used].contiguous() for grid in (self.scales, self.zeros))
        return IntegerWeight(codes, scales, zeros, self.bits, size, None if in_order else group)

    def split_rows(self, sizes: list[int]) -> list[IntegerWeight]:
        parts = zip(*(part.split(sizes) for part in (self.codes, self.scales, self.zeros)), strict=True)
        return [replace(self, codes=codes, scales=scales, zeros=zeros) for codes, scales, zeros in parts]

    def divisor_limits(self) -> tuple[Tensor, Tensor]:
        """The least and the largest divisor of each row [out] with which its scales stay normal numbers."""
        kind, scales = torch.finfo(self.scales.dtype), self.scales.float().abs()
        return scales.amax(1) / kind.max, scales.amin(1) / kind.tiny

    def divide_rows(self, divisors: Tensor) -> IntegerWeight:
        """What quantizing the weight with its rows divided would give: the same codes on a finer or coarser grid."""
        scales = round_scales(self.scales.float() / divisors[:, None], self.scales.dtype)
        return replace(self, scales=scales)


MARLIN_GROUPS = (-1, 32, 64, 128)  # group sizes that the newer kernels of vLLM and SGLang take


def refused_groups(group_size: int) -> Iterator[Refusal]:
    """Where the group size of a GPTQ or AWQ layer is one that vLLM has no kernel for."""
    if group_size not in MARLIN_GROUPS:
        yield Refusal("vLLM", f"groups of 32, 64, 128 or a whole row only, not {group_size}", VLLM_MARLIN)


def middle_code(bits: int) -> int:
    return 1 << (bits - 1)


def contiguous_groups(inputs: int, group_size: int, device: torch.device | None = None) -> Tensor:
    """Group ids without act-order, int32 [in]."""
    return (torch.arange(inputs, device=device) // group_size).to(torch.int32)


def ranges(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of every group [..., size], and always 0 between them."""
    low, high = torch.aminmax(groups, dim=-1)
    return low.clamp_(max=0), high.clamp_(min=0)


def fit_minmax(low: Tensor, high: Tensor, bits: int, sym: bool, lowest_zero: int = 0) -> tuple[Tensor, Tensor]:
    """The grid that just covers every range: float32 scales and float32 whole zeros.

    Asymmetric grids always contain 0. `lowest_zero` is 1 for layouts that cannot store a zero point of 0.
    """
    top = (1 << bits) - 1
    empty = (low == 0) & (high == 0)  # an all-zero group: any grid will do
    low, high = low.masked_fill(empty, -1.0), high.masked_fill(empty, 1.0)
    if sym:
        return 2 * torch.maximum(-low, high) / top, torch.full_like(low, middle_code(bits))
    scales = (high - low) / top
    zeros = torch.round(-low / scales).clamp(max=top)
    short = zeros < lowest_zero
    scales = torch.where(short, high / (top - lowest_zero), scales)
    return scales, zeros.clamp(min=lowest_zero)


def round_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as they will be stored, of either sign; never zero or subnormal, refused when they overflow."""
    sizes = scales.abs().clamp(min=torch.finfo(dtype).tiny)
    stored = torch.where(scales < 0, -sizes, sizes).to(dtype)
    if not bool(torch.isfinite(stored).all()):
        raise InputError(
            f"weights up to {float(sizes.max()):.3g} per step overflow {str(dtype)[6:]} scales; "
            "choose a format with bfloat16 or float32 scales (compressed-tensors)"
        )
    return stored


def nearest(values: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """What values become on a grid: rounded to the nearest code and decoded; all float32, broadcast together."""
    codes = torch.round(values / scales).add_(zeros).clamp_(0, (1 << bits) - 1)
    return codes.sub_(zeros).mul_(scales)


def round_to_grid(weight: Tensor, scales: Tensor, zeros: Tensor, bits: int, group_size: int) -> IntegerWeight:
    """Nearest codes of a weight [out, in] on a given grid [out, groups] with contiguous groups that divide `in`."""
    steps = scales.float().unsqueeze(-1)
    codes = torch.round(weight.float().unflatten(-1, (-1, group_size)) / steps) + zeros.float().unsqueeze(-1)
    codes = codes.clamp_(0, (1 << bits) - 1).to(torch.uint8).flatten(-2)
    return IntegerWeight(codes, scales, zeros.to(torch.uint8), bits, group_size)


@dataclass(frozen=True)
class IntegerFormat(Format):
    """What the integer layouts share. `group_size` -1 means one group per output row."""

    allowed_bits: ClassVar[tuple[int, ...]]

    bits: int = 4
    group_size: int = 128
    sym: bool = True
    dtype: str = "float16"  # of the scales

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: bits", self.bits, self.allowed_bits)
        check_choice(f"{self.name}: dtype", self.dtype, tuple(DTYPES))
        if self.group_size != -1 and self.group_size < 8:
            raise InputError(f"{self.name}: group_size is {self.group_size}, but must be -1 (per row) or at least 8")

    def describe(self) -> str:
        group = "row" if self.group_size == -1 else f"g{self.group_size}"
        return f"W{self.bits} {group} {'sym' if self.sym else 'asym'}"

    def group_width(self, inputs: int) -> int:
        return inputs if self.group_size == -1 else self.group_size

    def group_count(self, inputs: int) -> int:
        return -(-inputs // self.group_width(inputs))

    def input_unit(self, inputs: int) -> int:
        """Where a row is one group, every cut leaves it one."""
        width = self.group_width(inputs)
        return 1 if width >= inputs else width

    def check(self, shape: Shape) -> None:
        check_divides("the layer's input size", shape[1], self.group_width(shape[1]), "choose a group size that does")

    def quantize(self, weight: Tensor) -> IntegerWeight:
        self.check((weight.shape[0], weight.shape[1]))
        width = self.group_width(weight.shape[1])
        low, high = ranges(weight.float().unflatten(-1, (-1, width)))
        scales, zeros = self.fit(low, high)
        return round_to_grid(weight, scales, zeros, self.bits, width)

    def fit(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The grids that cover these ranges (low <= 0 <= high), as stored: scales, and float32 whole zeros."""
        scales, zeros = fit_minmax(low, high, self.bits, self.sym, self.zero_floor)
        stored = round_scales(scales, DTYPES[self.dtype])
        if not self.sym:  # the zero point belongs to the scale as stored
            zeros = torch.round(-low / stored.float()).clamp(self.zero_floor, (1 << self.bits) - 1)
        return stored, zeros

    @property
    def zero_floor(self) -> int:
        """The smallest zero point that the layout can store."""
        return 0

    def require_integer(self, quantized: QuantizedWeight) -> IntegerWeight:
        """The checks that every integer layout makes before it packs."""
        if not isinstance(quantized, IntegerWeight):
            raise CannotHold(f"{self.name} stores integer grids, not the value table of {type(quantized).__name__}")
        if quantized.bits != self.bits:
            raise CannotHold(f"{self.name} is set to {self.bits} bits, the weights have {quantized.bits}")
        if quantized.group_size != self.group_width(quantized.shape[1]):
            raise CannotHold(
                f"{self.name} is set to {self.describe()}, the weights have groups of {quantized.group_size}"
            )
        if self.sym and not quantized.symmetric:
            raise CannotHold(f"{self.name} is set to symmetric, the weights have zero points off the middle")
        return quantized
