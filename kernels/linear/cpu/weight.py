"""A linear layer's weight on a CPU, and how it is multiplied.

tiles  packed codes, with x in whole numbers (`tiled.py`), or in float32 where that takes less (`floats.py`)
slabs  everything: decoded a part at a time (`slabs.py`); FP8, where it is in no tiles, for few tokens widened in
       registers (`float_rows.py`), for many in panels
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import (
    AbsmaxInt8Weight,
    CodebookWeight,
    Float8Weight,
    Format,
    GgufWeight,
    IntegerWeight,
    QuantizedWeight,
)
from quantkit.formats.ct_float8 import BLOCK
from quantkit.kernels.card import Card
from quantkit.kernels.checks import HALVES, check_dtype, check_same_device, check_shape
from quantkit.kernels.cpu import installed
from quantkit.kernels.linear.cpu import float_rows, floats, slabs, tiled
from quantkit.kernels.linear.cpu.slabs import Rows, product_dtype, rows_of
from quantkit.kernels.linear.cpu.tiled import TILE_ROWS, Tiles
from quantkit.kernels.linear.cpu.tiling import tiles_of
from quantkit.kernels.linear.fuse import same
from quantkit.kernels.linear.weight import Choice, Kernel, LinearWeight, Untuned, by_name

PRECISE_TOKENS = 2  # up to which x has two digits: reading the weight takes longer than to multiply with both


@dataclass(frozen=True)
class CpuWeight(Untuned):
    """For x of one dtype, in tiles or in rows."""

    fmt: Format
    outputs: int
    inputs: int
    dtype: torch.dtype
    held: Tiles | Rows
    order: Tensor | None = None  # int64 [inputs]: column c of the codes is input order[c]
    input_scale: QuantizedWeight | None = None  # the weight itself, where it carries the scale of its inputs

    @property
    def output_unit(self) -> int:
        return TILE_ROWS if isinstance(self.held, Tiles) else 1

    @property
    def nbytes(self) -> int:
        return self.held.nbytes + (0 if self.order is None else self.order.nbytes)

    @property
    def device(self) -> torch.device:
        return self.held.codes.device

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        return _KERNELS

    @property
    def has_rows(self) -> bool:
        """Whether single rows can be decoded."""
        return isinstance(self.held, Tiles) and self.held.has_rows and self.order is None

    def rows(self, outputs: Tensor) -> Tensor:
        """The weight of some outputs, [some, inputs]."""
        assert isinstance(self.held, Tiles)
        return self.held.rows(outputs)[:, : self.inputs].to(self.dtype)

    def default(self, tokens: int, card: Card, dtype: torch.dtype = torch.bfloat16) -> Choice:
        return _TILES if isinstance(self.held, Tiles) else _SLABS

    def join(self, others: Sequence[LinearWeight]) -> Self | None:
        if self.input_scale is not None or any(self._differs(other) for other in others):
            return None
        outputs = self.outputs + sum(other.outputs for other in others)
        held = [other.held for other in others if isinstance(other, CpuWeight)]
        return replace(self, outputs=outputs, held=self.held.join(held))  # type: ignore[arg-type]

    def _differs(self, other: LinearWeight) -> bool:
        if not isinstance(other, CpuWeight) or not same(self.order, other.order):
            return True
        return (self.fmt, self.inputs, self.dtype, self.held.kind) != (
            other.fmt, other.inputs, other.dtype, other.held.kind)  # fmt: skip


def why_not(quantized: QuantizedWeight) -> str | None:
    """What keeps a weight from this room, or None. Groups must all have one size and end with their row."""
    if isinstance(quantized, IntegerWeight):
        counts = torch.bincount(quantized.input_groups(), minlength=quantized.scales.shape[1])
        if bool((counts != counts[0]).any()):
            return f"groups of {quantized.group_size} that do not divide {quantized.shape[1]} inputs evenly"
        return None
    if isinstance(quantized, CodebookWeight):
        across = quantized.shape[1] % quantized.block
        return f"blocks of {quantized.block} across the ends of rows of {quantized.shape[1]} inputs" if across else None
    if isinstance(quantized, GgufWeight):
        return None if installed.can_compile() and quantized.group % 16 == 0 else "GGUF blocks without their kernel"
    if isinstance(quantized, Float8Weight):
        ragged = quantized.scales.shape[1] > 1 and quantized.shape[1] % BLOCK
        return f"blocks of {BLOCK} that do not divide {quantized.shape[1]} inputs" if ragged else None
    return None if isinstance(quantized, AbsmaxInt8Weight) else f"a {type(quantized).__name__}"


def lay_out(fmt: Format, quantized: QuantizedWeight, dtype: torch.dtype) -> CpuWeight | None:
    """For x of this dtype; None where `why_not` says why."""
    if dtype not in (*HALVES, torch.float32):
        raise InputError(f"linear on a CPU: dtype is {str(dtype)[6:]}, but must be bfloat16, float16, float32")
    device = next(part.device for part in vars(quantized).values() if isinstance(part, Tensor))
    if device.type != "cpu":
        raise InputError(f"linear on a CPU: the weight is on {device}; move it to the CPU first")
    if why_not(quantized) is not None:
        return None
    order = None
    if isinstance(quantized, IntegerWeight):
        quantized, order = _sorted_by_group(quantized)
    rounding = fmt.input_rounding
    input_scale = quantized if rounding and rounding.calibrated else None
    return CpuWeight(fmt, *quantized.shape, dtype, tiles_of(quantized, dtype) or rows_of(quantized), order, input_scale)


def _sorted_by_group(weight: IntegerWeight) -> tuple[IntegerWeight, Tensor | None]:
    """The weight with contiguous groups, and the order of its columns where act-order had scattered them."""
    if weight.group_of is None:
        return weight, None
    order = torch.argsort(weight.input_groups(), stable=True)
    return replace(weight, codes=weight.codes[:, order], group_of=None), order


def _run(x: Tensor, weight: CpuWeight, *, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """y [tokens, outputs] = x [tokens, inputs] @ weight.T + bias, all in the weight's dtype."""
    if not (x.shape[1:] == (weight.inputs,) and x.dtype == weight.dtype and x.is_cpu and bias is None and out is None):
        _check(x, weight, bias, out)
    y = x.new_empty(x.shape[0], weight.outputs) if out is None else out
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    bias = None if bias is None else bias.contiguous()
    result = y if y.stride(1) == 1 else torch.empty_like(y, memory_format=torch.contiguous_format)
    _multiply(x, weight, bias, result)
    return y if result is y else y.copy_(result)


def _multiply(x: Tensor, weight: CpuWeight, bias: Tensor | None, y: Tensor) -> None:
    held, rounding = weight.held, weight.fmt.input_rounding
    if isinstance(held, Rows) and held.float8 and float_rows.takes_float8(x, weight.fmt):
        float_rows.multiply_float8(x, weight.fmt, weight.input_scale, held.codes, held.scales, bias, y)
        return
    if isinstance(held, Tiles) and held.float8:
        x, rounding = _raised(x, weight, held), None
    elif isinstance(held, Rows) and rounding:
        x, rounding = _rounded(x, weight, held), None
    x = x if weight.order is None else x[:, weight.order]
    digits = _digits(weight, x.shape[0])
    if floats.pays(held, x.shape[0], digits):
        floats.multiply(x, held, bias, y, rounding=rounding)
    elif isinstance(held, Tiles):
        tiled.multiply(x, held, bias, y, digits=digits, rounding=rounding)
    else:
        slabs.multiply(x.to(product_dtype(weight.dtype)), held, bias, y)


def _raised(x: Tensor, weight: CpuWeight, held: Tiles) -> Tensor:
    from quantkit.kernels.cpu.widening import widened

    if weight.fmt.input_rounding is None:
        return widened(x, raised=True)
    return float_rows.rounded(x, weight.input_scale, held.scales.shape[1], raised=True)


def _rounded(x: Tensor, weight: CpuWeight, held: Rows) -> Tensor:
    if held.float8 and installed.can_compile():
        return float_rows.rounded(x, weight.input_scale, held.scales.shape[1])
    return weight.fmt.served_inputs(x, weight.input_scale)


def _digits(weight: CpuWeight, tokens: int) -> int:
    """Three are float32; of 16 bits two are more than enough, and one is as fast as many tokens can be. Formats that
    round x mean one, and so do GGUF blocks with small scales: as whole numbers these are multiplied with no more."""
    if weight.fmt.input_rounding:
        return 1
    if weight.dtype == torch.float32:
        return 3
    whole = isinstance(weight.held, Tiles) and weight.held.every > 1
    return 2 if tokens <= PRECISE_TOKENS and not whole else 1


_KERNELS = by_name(Kernel("tiles", _run), Kernel("slabs", _run))
_TILES, _SLABS = (Choice(name, None, "on the CPU") for name in _KERNELS)


def _check(x: Tensor, weight: CpuWeight, bias: Tensor | None, out: Tensor | None) -> None:
    kernel = "linear on a CPU"
    check_shape(kernel, "x", x, (None, weight.inputs))
    check_dtype(kernel, "x", x, (weight.dtype,))
    check_same_device(kernel, weight=weight.held.codes, x=x, bias=bias, out=out)
    if bias is not None:
        check_shape(kernel, "bias", bias, (weight.outputs,))
        check_dtype(kernel, "bias", bias, (weight.dtype,))
    if out is not None:
        check_shape(kernel, "out", out, (x.shape[0], weight.outputs))
        check_dtype(kernel, "out", out, (weight.dtype,))
