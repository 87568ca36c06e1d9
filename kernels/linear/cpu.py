"""Linear layers on a CPU: torch's packed products for few tokens, a slab of rows decoded at a time for more.

    int4    `aten._weight_int4pack_mm_for_cpu`: integers of up to 4 bits, groups that 32 divides
    int8    `aten._weight_int8pack_mm`: 8-bit integers with one scale a row and no zero point
    slabs   everything: as many rows as hold 2**20 weights are decoded, multiplied and forgotten

Slabs need 10 MB (W4) to 22 MB (NF4) beside the result; decoding a whole 4096 x 4096 needs 102 to 269 MB. The packed
products run for bfloat16 only: for others torch has plain loops, on x86 slower than slabs from the first token on.
Their time grows with every token (4096 x 4096, 2 cores, ms at 1, 8, 64, 256 tokens: int4 1.0, 2.5, 19, 76; int8 1.4,
3.4, 22, 85), that of slabs hardly (W4 15, 13, 20, 30; W8 12, 11, 15, 25); decoding the whole weight takes 55 to 67.

A CPU that does not multiply 16 bits itself has plain loops for everything in 16 bits, and its int4 product cuts results
off instead of rounding them. There all products run in float32 (Neoverse N1, 2 cores, W4, ms at 1, 8, 32 tokens: int4
6.7, 41, 161, slabs 41, 30, 45; slabs in bfloat16 272, 3661, 9550).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from quantkit.errors import InputError
from quantkit.formats import AbsmaxInt8Weight, CodebookWeight, Float8Weight, Format, IntegerWeight, QuantizedWeight
from quantkit.formats.codebook import table_of
from quantkit.formats.ct_float8 import BLOCK
from quantkit.formats.integer import middle_code
from quantkit.kernels.card import Card
from quantkit.kernels.checks import HALVES, check_dtype, check_same_device, check_shape
from quantkit.kernels.linear.weight import Choice, Kernel, Untuned, by_name

SLAB = 1 << 20  # weights decoded at a time: 2 to 4 MB, about what two cores keep in their caches
PACKED_TOKENS = 32  # up to which packed products run
PLAIN_PACKED_TOKENS = 4  # the same where they are plain loops
NIBBLE_GROUPS = (256, 128, 64, 32)  # that the int4 product takes; larger groups are repeated
NIBBLE_ROWS = 64  # outputs are padded to the widest block of the int4 product
INT8_STEP = 16  # inputs that the int8 product reads at once, without a mask
ALIGNMENT = 64  # bytes; the int8 product reads x and codes with aligned loads, which fault elsewhere


@dataclass(frozen=True)
class Nibbles:
    """`weight = (code - 8) * scale + zero` with groups of inputs, as torch's int4 product reads it.

    codes           uint8 [rows, inputs / 2]  in torch's own order, which depends on the CPU; rows: outputs padded to 64
    scale_and_zero  [groups, rows, 2] in the dtype of products
    """

    codes: Tensor
    scale_and_zero: Tensor
    group: int


@dataclass(frozen=True)
class Rows:
    """`weight = (value - zero) * scale`, where value is the code itself or its entry in a table.

    codes   int8 (integers, less the middle code) or uint8 (places in the table) [outputs, inputs]; paired: [outputs,
            inputs / 2], column c in the low half of byte c, column c + inputs / 2 in the high half
    scales  float [outputs, groups]
    zeros   float [outputs, groups] | None   whole numbers, less the middle code; None where all are 0
    table   float32 [values] | None
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    table: Tensor | None = None
    paired: bool = False

    def decode(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """The weight of some outputs, [stop - start, inputs]: exact products of value and scale, rounded once."""
        codes = self.codes[start:stop]
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


@dataclass(frozen=True)
class CpuWeight(Untuned):
    """One linear layer's weight for x of one dtype. Four-bit weights for bfloat16 are kept twice, a byte in all."""

    fmt: Format
    outputs: int
    inputs: int
    dtype: torch.dtype
    rows: Rows
    nibbles: Nibbles | None = None
    order: Tensor | None = None  # int64 [inputs]: column c of the codes is input order[c]
    input_scale: QuantizedWeight | None = None  # the weight itself, where it carries the scale of its inputs

    @property
    def nbytes(self) -> int:
        parts = [*vars(self.rows).values(), *(vars(self.nibbles).values() if self.nibbles else ()), self.order]
        return sum(part.nbytes for part in parts if isinstance(part, Tensor))

    @property
    def device(self) -> torch.device:
        return self.rows.codes.device

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        return _KERNELS

    def default(self, tokens: int, card: Card, dtype: torch.dtype = torch.bfloat16) -> Choice:
        return Choice(choose(self, tokens), None, f"on the CPU, {tokens} tokens")


def why_not(quantized: QuantizedWeight) -> str | None:
    """What keeps a weight from this file, or None. Groups must all have one size and end with their row."""
    if isinstance(quantized, IntegerWeight):
        counts = torch.bincount(quantized.input_groups(), minlength=quantized.scales.shape[1])
        if bool((counts != counts[0]).any()):
            return f"groups of {quantized.group_size} that do not divide {quantized.shape[1]} inputs evenly"
        return None
    if isinstance(quantized, CodebookWeight):
        across = quantized.shape[1] % quantized.block
        return f"blocks of {quantized.block} across the ends of rows of {quantized.shape[1]} inputs" if across else None
    if isinstance(quantized, Float8Weight):
        ragged = quantized.scales.shape[1] > 1 and quantized.shape[1] % BLOCK
        return f"blocks of {BLOCK} that do not divide {quantized.shape[1]} inputs" if ragged else None
    return None if isinstance(quantized, AbsmaxInt8Weight) else f"a {type(quantized).__name__}"


def lay_out(fmt: Format, quantized: QuantizedWeight, dtype: torch.dtype) -> CpuWeight | None:
    """In the order of the products, for x of this dtype; None where `why_not` says why."""
    if dtype not in (*HALVES, torch.float32):
        raise InputError(f"linear on a CPU: dtype is {str(dtype)[6:]}, but must be bfloat16, float16, float32")
    device = next(part.device for part in vars(quantized).values() if isinstance(part, Tensor))
    if device.type != "cpu":
        raise InputError(f"linear on a CPU: the weight is on {device}; move it to the CPU first")
    if why_not(quantized) is not None:
        return None
    order, nibbles = None, None
    if isinstance(quantized, IntegerWeight):
        quantized, order = _sorted_by_group(quantized)
        nibbles = _nibbles(quantized, product_dtype(dtype)) if dtype == torch.bfloat16 else None
    rounding = fmt.input_rounding
    input_scale = quantized if rounding and rounding.calibrated else None
    return CpuWeight(fmt, *quantized.shape, dtype, _rows(quantized), nibbles, order, input_scale)


Product = Callable[[Tensor, CpuWeight, Tensor | None, Tensor], Tensor]


def _matmul(
    product: Product, x: Tensor, weight: CpuWeight, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """y [tokens, outputs] = x [tokens, inputs] @ weight.T + bias, all in the weight's dtype."""
    _check(x, weight, bias, out)
    y = x.new_empty(x.shape[0], weight.outputs) if out is None else out
    if y.numel() == 0:
        return y
    if weight.fmt.input_rounding:
        x = weight.fmt.served_inputs(x, weight.input_scale)
    if weight.order is not None:
        x = x[:, weight.order]
    return product(x.to(product_dtype(weight.dtype)), weight, bias, y)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same for a weight that is not quantized: torch's own where it is fast, else slabs of float32."""
    if x.device.type != "cpu" or product_dtype(x.dtype) == x.dtype:
        return linear(x, weight, bias)
    y, wide = x.new_empty(x.shape[0], len(weight)), x.to(product_dtype(x.dtype))
    return _by_slabs(wide, lambda start, stop: weight[start:stop].to(wide.dtype), bias, y)


@cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which x of this dtype is multiplied: in float32 where this CPU has no instructions for 16 bits."""
    ops = torch.ops.mkldnn
    if dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported():
        return dtype
    on_arm = platform.machine().lower() in ("aarch64", "arm64")  # torch does not use what there is for float16
    if dtype == torch.float16 and ops._is_mkldnn_fp16_supported() and not on_arm:
        return dtype
    return torch.float32


def choose(weight: CpuWeight, tokens: int) -> str:
    """The fastest product: int4, int8 or slabs."""
    plain = product_dtype(weight.dtype) != weight.dtype
    if weight.dtype != torch.bfloat16 or tokens > (PLAIN_PACKED_TOKENS if plain else PACKED_TOKENS):
        return "slabs"
    if weight.nibbles is not None:
        return "int4"
    rows = weight.rows
    simple = rows.codes.dtype == torch.int8 and not rows.paired and rows.zeros is None and rows.scales.shape[1] == 1
    return "int8" if simple and weight.inputs % INT8_STEP == 0 else "slabs"


def _check(x: Tensor, weight: CpuWeight, bias: Tensor | None, out: Tensor | None) -> None:
    kernel = "linear on a CPU"
    check_shape(kernel, "x", x, (None, weight.inputs))
    check_dtype(kernel, "x", x, (weight.dtype,))
    check_same_device(kernel, weight=weight.rows.codes, x=x, bias=bias, out=out)
    if bias is not None:
        check_shape(kernel, "bias", bias, (weight.outputs,))
        check_dtype(kernel, "bias", bias, (weight.dtype,))
    if out is not None:
        check_shape(kernel, "out", out, (x.shape[0], weight.outputs))
        check_dtype(kernel, "out", out, (weight.dtype,))


def _int4(x: Tensor, weight: CpuWeight, bias: Tensor | None, y: Tensor) -> Tensor:
    nibbles = weight.nibbles
    assert nibbles is not None
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.contiguous(), nibbles.codes, nibbles.group, nibbles.scale_and_zero
    )
    product = product[:, : weight.outputs]
    return y.copy_(product if bias is None else product + bias)


def _int8(x: Tensor, weight: CpuWeight, bias: Tensor | None, y: Tensor) -> Tensor:
    scales = weight.rows.scales.flatten().to(x.dtype)
    product = torch.ops.aten._weight_int8pack_mm(_aligned(x), weight.rows.codes, scales)
    return y.copy_(product if bias is None else product + bias)


def _slabs(x: Tensor, weight: CpuWeight, bias: Tensor | None, y: Tensor) -> Tensor:
    return _by_slabs(x, lambda start, stop: weight.rows.decode(start, stop, x.dtype), bias, y)


_KERNELS = by_name(
    Kernel("int4", partial(_matmul, _int4)),
    Kernel("int8", partial(_matmul, _int8)),
    Kernel("slabs", partial(_matmul, _slabs)),
)


def _by_slabs(x: Tensor, rows: Callable[[int, int], Tensor], bias: Tensor | None, y: Tensor) -> Tensor:
    """y = x @ weight.T + bias, some outputs at a time; `rows(start, stop)` are those of the weight, in x's dtype."""
    outputs, size = y.shape[1], max(1, SLAB // x.shape[1])
    for start in range(0, outputs, size):
        stop = min(start + size, outputs)
        y[:, start:stop] = linear(x, rows(start, stop), None if bias is None else bias[start:stop].to(x.dtype))
    return y


def _sorted_by_group(weight: IntegerWeight) -> tuple[IntegerWeight, Tensor | None]:
    """The weight with contiguous groups, and the order of its columns where act-order had scattered them."""
    if weight.group_of is None:
        return weight, None
    order = torch.argsort(weight.input_groups(), stable=True)
    return replace(weight, codes=weight.codes[:, order], group_of=None), order


def _nibbles(weight: IntegerWeight, dtype: torch.dtype) -> Nibbles | None:
    """The zero point belongs to the scale as the dtype rounds it, so that code = zero point still means about 0."""
    outputs, inputs = weight.shape
    size = inputs // weight.scales.shape[1]
    group = next((group for group in NIBBLE_GROUPS if weight.bits <= 4 and size % group == 0), None)
    if group is None:
        return None
    shift = 8 - middle_code(weight.bits)  # codes of 2 and 3 bits move to the middle of the 16
    short = -outputs % NIBBLE_ROWS
    scales = pad(weight.scales.repeat_interleave(size // group, 1).mT, (0, short)).to(dtype)  # [groups, rows]
    zeros = pad(weight.zeros.repeat_interleave(size // group, 1).mT, (0, short)).float()
    offsets = (8 - shift - zeros) * scales.float()
    return Nibbles(
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(pad(weight.codes + shift, (0, 0, 0, short)).int(), 1),
        torch.stack([scales, offsets.to(dtype)], -1).contiguous(),
        group,
    )


def _rows(weight: QuantizedWeight) -> Rows:
    if isinstance(weight, IntegerWeight):
        return _integer_rows(weight)
    if isinstance(weight, CodebookWeight):
        codes, paired = _pairs(weight.codes.view(weight.shape))
        scales = weight.block_scales.view(weight.shape[0], -1)
        return Rows(codes, scales, table=table_of(weight.kind), paired=paired)
    if isinstance(weight, Float8Weight):
        return _float8_rows(weight)
    assert isinstance(weight, AbsmaxInt8Weight)
    return Rows(_aligned(weight.codes), (weight.row_absmax / 127).unsqueeze(-1))


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
    outputs = weight.shape[0]
    scales = weight.scales.float()
    if scales.shape[1] == 1 and scales.shape[0] in (1, outputs):
        scales = scales.expand(outputs, 1)
    else:
        scales = scales.repeat_interleave(BLOCK, dim=0)[:outputs]
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return Rows(weight.values.contiguous().view(torch.uint8), scales.contiguous(), table=table)


def _aligned(values: Tensor) -> Tensor:
    """Contiguous and on an aligned address, copied only where it must be."""
    values = values.contiguous()
    return values if values.data_ptr() % ALIGNMENT == 0 else values.clone()
