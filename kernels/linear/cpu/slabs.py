"""Linear layers on a CPU without a compiler, and in float32: some rows decoded at a time, multiplied and forgotten.

As many rows as hold 2**20 weights need 10 MB (W4) to 22 MB (NF4) beside the result; decoding a whole 4096 x 4096 needs
102 to 269 MB. A CPU that does not multiply 16 bits itself multiplies everything in float32.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.formats import AbsmaxInt8Weight, CodebookWeight, Float8Weight, IntegerWeight, QuantizedWeight
from quantkit.formats.codebook import table_of
from quantkit.formats.ct_float8 import BLOCK
from quantkit.formats.integer import middle_code
from quantkit.kernels.cpu import installed
from quantkit.kernels.linear.cpu import float_rows

if TYPE_CHECKING:
    from quantkit.kernels.linear.cpu.floats import FloatPlan

SLAB = 1 << 20  # weights decoded at a time: 2 to 4 MB, about what two cores keep in their caches


@dataclass(frozen=True)
class Rows:
    """`weight = (value - zero) * scale`, where value is the code itself or its entry in a table.

    codes   int8 (integers, less the middle code) or uint8 (places in the table) [outputs, inputs]; paired: [outputs,
            inputs / 2], column c in the low half of byte c, column c + inputs / 2 in the high half
    scales  float [outputs, groups]
    zeros   float [outputs, groups] | None   whole numbers, less the middle code; None where all are 0
    table   float32 [values] | None
    float8  codes are bits of float8 e4m3, and the table has all of its values
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    table: Tensor | None = None
    paired: bool = False
    float8: bool = False
    float_plans: dict[tuple[object, ...], FloatPlan] = field(default_factory=dict, init=False, repr=False)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))

    @property
    def kind(self) -> tuple[object, ...]:
        """What those have in common that can be joined."""
        zeros = None if self.zeros is None else self.zeros.dtype
        return self.paired, self.float8, self.codes.dtype, self.codes.shape[1], self.scales.shape[1:], zeros

    def join(self, others: list[Rows]) -> Rows:
        """With the rows of others of the same kind."""
        parts = [self, *others]
        return replace(
            self,
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zeros=None if self.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None]),
        )

    def decode(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """The weight of some outputs, [stop - start, inputs]: exact products of value and scale, rounded once."""
        codes = self.codes[start:stop]
        if self.float8 and installed.can_compile():
            from quantkit.kernels.cpu.float8 import widen

            return widen(codes, self.scales[start:stop]).to(dtype)
        if self.paired:
            codes = torch.cat([codes << 4 >> 4, codes >> 4], 1)  # shifts keep the sign of int8
        if self.table is None:  # in 16 bits where the scales have the same: half the traffic, and codes are exact
            values = codes.to(torch.promote_types(self.scales.dtype, dtype))
        else:
            values = self.table.index_select(0, codes.flatten().int())  # several times as fast as table[codes]
        values = values.view(stop - start, self.scales.shape[1], -1)  # [rows, groups, size]
        if self.zeros is not None:
            values = values.sub_(self.zeros[start:stop].unsqueeze(-1))
        return values.mul_(self.scales[start:stop].unsqueeze(-1)).view(codes.shape).to(dtype)


def multiply(x: Tensor, rows: Rows, bias: Tensor | None, y: Tensor) -> Tensor:
    """y = x @ weight.T + bias, x in the dtype of products."""
    return _by_slabs(x, lambda start, stop: rows.decode(start, stop, x.dtype), bias, y)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """For a weight that is not quantized, perhaps in fewer bits than x: few tokens by a kernel, more by torch where it
    multiplies x's dtype fast, else in slabs of float32."""
    if float_rows.takes(x, weight):
        return float_rows.multiply(x, weight, bias, x.new_empty(x.shape[0], weight.shape[0]) if out is None else out)
    if x.device.type != "cpu" or product_dtype(x.dtype) == x.dtype == weight.dtype:
        y = linear(x, weight, bias)
        return y if out is None else out.copy_(y)
    y, wide = x.new_empty(x.shape[0], len(weight)) if out is None else out, x.to(product_dtype(x.dtype))
    return _by_slabs(wide, lambda start, stop: weight[start:stop].to(wide.dtype), bias, y)


@cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which x of this dtype is multiplied: in float32 where this CPU has no instructions for 16 bits.

    With AVX-512 alone torch multiplies bfloat16, too, but slower than float32.
    """
    ops = torch.ops.mkldnn
    on_arm = platform.machine().lower() in ("aarch64", "arm64")  # torch does not use what there is for float16
    has_bfloat16 = on_arm or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if dtype == torch.bfloat16 and has_bfloat16 and ops._is_mkldnn_bf16_supported():
        return dtype
    if dtype == torch.float16 and ops._is_mkldnn_fp16_supported() and not on_arm:
        return dtype
    return torch.float32


def _by_slabs(x: Tensor, rows: Callable[[int, int], Tensor], bias: Tensor | None, y: Tensor) -> Tensor:
    """y = x @ weight.T + bias, some outputs at a time; `rows(start, stop)` are those of the weight, in x's dtype."""
    outputs, size = y.shape[1], max(1, SLAB // x.shape[1])
    for start in range(0, outputs, size):
        stop = min(start + size, outputs)
        y[:, start:stop] = linear(x, rows(start, stop), None if bias is None else bias[start:stop].to(x.dtype))
    return y


def rows_of(weight: QuantizedWeight) -> Rows:
    """Of a weight whose groups are contiguous and all of one size."""
    if isinstance(weight, IntegerWeight):
        return _integer_rows(weight)
    if isinstance(weight, CodebookWeight):
        codes, paired = _pairs(weight.codes.view(weight.shape))
        scales = weight.block_scales.view(weight.shape[0], -1)
        return Rows(codes, scales, table=table_of(weight.kind), paired=paired)
    if isinstance(weight, Float8Weight):
        return _float8_rows(weight)
    assert isinstance(weight, AbsmaxInt8Weight)
    return Rows(weight.codes.contiguous(), (weight.row_absmax / 127).unsqueeze(-1))


def _pairs(codes: Tensor) -> tuple[Tensor, bool]:
    """Codes of 4 bits, signed or not, as two a byte, where their number is even."""
    if codes.shape[1] % 2:
        return codes.contiguous(), False
    low, high = codes.chunk(2, 1)
    return (low & 15) | (high << 4), True


def _integer_rows(weight: IntegerWeight) -> Rows:
    middle = middle_code(weight.bits)
    codes, paired = (weight.codes.contiguous() - middle).view(torch.int8), False  # bytes wrap around
    if weight.bits <= 4:
        codes, paired = _pairs(codes)
    zeros = None if weight.symmetric else weight.zeros.to(weight.scales.dtype) - middle
    return Rows(codes, weight.scales, zeros, paired=paired)


def _float8_rows(weight: Float8Weight) -> Rows:
    """Read by a table of all 256 values, which torch looks up faster than it converts them."""
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = weight.values.contiguous().view(torch.uint8)
    return Rows(codes, scales_by_row(weight), table=table, float8=True)


def scales_by_row(weight: Float8Weight) -> Tensor:
    """Float32 [outputs, groups of inputs], contiguous."""
    outputs, scales = weight.shape[0], weight.scales.float()
    if scales.shape[1] == 1 and scales.shape[0] in (1, outputs):
        return scales.expand(outputs, 1).contiguous()
    return scales.repeat_interleave(BLOCK, dim=0)[:outputs].contiguous()
