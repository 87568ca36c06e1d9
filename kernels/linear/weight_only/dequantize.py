"""A packed weight written out in 16 bit, for products with many tokens that a plain matmul does best; or in float8.

Writing and reading the decoded weight costs about a fifth of the product at 1,024 tokens, and less beyond.

Layout   weight as in `weight.py` -> [outputs, inputs] bfloat16 or float16, or float8 e4m3 [rows, columns] as
         `eight_bit/weight.py` has it; under act-order the columns are in the kernel's order, to be multiplied with
         x[:, weight.order]
Meaning  `QuantizedWeight.dequantize`, and `formats/float8_rows.py` of it; NF4 and FP4 values are rounded to 16 bit
         before they are scaled
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.card import card_of
from quantkit.kernels.checks import HALVES, check_dtype, check_same_device, check_shape
from quantkit.kernels.linear.arguments import check_arguments
from quantkit.kernels.linear.eight_bit.quantize_rows import to_float8
from quantkit.kernels.linear.weight import CHUNK, Kernel
from quantkit.kernels.linear.weight_only.assembly import PTX, TRITON, assembly
from quantkit.kernels.linear.weight_only.unpack import (
    decode_slabs,
    load_offset,
    load_scales,
    load_zeros,
    operand,
    to_half,
)
from quantkit.kernels.linear.weight_only.weight import PackedWeight

NAME = "dequantize"
_ROWS = 64  # outputs per program


@triton.jit
def _dequantize(
    words,
    high,
    scales,
    zeros,
    nested,
    nested_table,
    nested_scales,
    nested_offsets,
    table,
    row_scales,
    out,
    outputs,
    inputs,
    columns,
    rows,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    NESTED_EVERY: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    FLOAT8: tl.constexpr,
    ROWS: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    width: tl.constexpr = GROUP if GROUP < 128 else 128
    column = tl.arange(0, width)
    place = (chunk * rows + row[:, None]) * 16 + tl.arange(0, 16)[None, :]
    packed = tl.load(words + place, eviction_policy="evict_first")
    above = packed
    if KIND == "int3" or KIND == "int8":
        above = tl.load(high + place, eviction_policy="evict_first")
    origins = load_zeros(zeros, chunk, row, rows, GROUP, ONE_GROUP, HAS_ZEROS)
    slabs = decode_slabs(packed, above, origins, table, KIND, MIDDLE, DTYPE, ASM, CONSTRAINTS, INTERPRET)
    groups = 1 if ONE_GROUP else inputs // GROUP
    nested_offset = load_offset(nested_offsets, tl.program_id(1) * ROWS, ROWS, NESTED_EVERY)
    factors = load_scales(nested if NESTED_EVERY > 0 else scales, nested_table, nested_scales, nested_offset, chunk,
                          row, rows, groups, GROUP, ONE_GROUP, NESTED_EVERY)  # fmt: skip
    if FLOAT8:
        row_scale = tl.load(row_scales + row)
    for part in tl.static_range(128 // width):
        value = operand(slabs, part, width, ROWS).to(tl.float32)
        at = chunk * 128 + part * width + column
        place = out + row.to(tl.int64)[:, None] * columns + at[None, :]
        if FLOAT8:
            tl.store(place, to_float8(value * tl.div_rn(factors[part], row_scale)[:, None], INTERPRET))
        else:
            mask = (row < outputs)[:, None] & (at < inputs)[None, :]
            tl.store(place, to_half(value * factors[part][:, None], DTYPE, INTERPRET), mask=mask)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight [outputs, inputs] in 16 bit, columns in the kernel's order."""
    result = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.device)
    check_dtype(NAME, "result", result, HALVES)
    _write(weight, None, result, dtype)
    return result


def to_float8_rows(weight: PackedWeight, row_scales: Tensor) -> Tensor:
    """The weight [rows, columns] in float8, columns in the kernel's order; `row_scales` float32 [rows] are not zero.

    What is padded has finite values.
    """
    check_shape(NAME, "row_scales", row_scales, (weight.rows,))
    check_dtype(NAME, "row_scales", row_scales, (torch.float32,))
    check_same_device(NAME, row_scales=row_scales, weight=weight.device)
    result = torch.empty(weight.rows, weight.chunks * CHUNK, dtype=torch.float8_e4m3fn, device=weight.device)
    _write(weight, row_scales, result, torch.float16)
    return result


def _write(weight: PackedWeight, row_scales: Tensor | None, result: Tensor, dtype: torch.dtype) -> None:
    """Codes become values of this dtype first."""
    fused = not card_of(weight.device).adds_bfloat16
    text, constraints = assembly(weight.code_type, PTX[dtype], weight.table_values, weight.zero_points, fused=fused)
    _dequantize[(weight.chunks, weight.rows // _ROWS)](
        *weight.arguments(),
        row_scales,
        result,
        weight.outputs,
        weight.inputs,
        result.shape[1],
        weight.rows,
        **weight.constants(),
        MIDDLE=weight.middle,
        ASM=text,
        CONSTRAINTS=constraints,
        DTYPE=TRITON[dtype],
        INTERPRET=triton.knobs.runtime.interpret,
        FLOAT8=row_scales is not None,
        ROWS=_ROWS,
        num_warps=4,
    )


def matmul(x: Tensor, weight: PackedWeight, *, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """y [tokens, outputs] in x's dtype: the weight is decoded into scratch memory once, then a plain matmul runs."""
    check_arguments("weight-only matmul", x, weight, bias, out)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    decoded = dequantize(weight, x.dtype)
    y = x.new_empty(x.shape[0], weight.outputs) if out is None else out
    if bias is None:
        return torch.mm(x, decoded.mT, out=y)
    return torch.addmm(bias.to(x.dtype), x, decoded.mT, out=y)


KERNEL = Kernel("dequantize", matmul)
