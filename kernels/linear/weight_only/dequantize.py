"""A packed weight written out in 16 bit, for products with many tokens that a plain matmul does best.

Writing and reading the decoded weight costs about a fifth of the product at 1,024 tokens, and less beyond.

Layout   weight as in `weight.py` -> [outputs, inputs] bfloat16 or float16; under act-order the columns are in the
         kernel's order, to be multiplied with x[:, weight.order]
Meaning  `QuantizedWeight.dequantize`; NF4 and FP4 values are rounded to 16 bit before they are scaled
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.card import card_of
from quantkit.kernels.checks import HALVES, check_dtype
from quantkit.kernels.linear.arguments import check_arguments
from quantkit.kernels.linear.weight import Kernel
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
    out,
    outputs,
    inputs,
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
    for part in tl.static_range(128 // width):
        value = operand(slabs, part, width, ROWS).to(tl.float32)
        at = chunk * 128 + part * width + column
        tl.store(
            out + row.to(tl.int64)[:, None] * inputs + at[None, :],
            to_half(value * factors[part][:, None], DTYPE, INTERPRET),
            mask=(row < outputs)[:, None] & (at < inputs)[None, :],
        )


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight [outputs, inputs] in 16 bit, columns in the kernel's order."""
    result = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.device)
    check_dtype(NAME, "result", result, HALVES)
    fused = not card_of(weight.device).adds_bfloat16
    kind = (weight.code_type, PTX[result.dtype], weight.table_values, weight.zero_points)
    text, constraints = assembly(*kind, fused=fused)
    _dequantize[(weight.chunks, weight.rows // _ROWS)](
        *weight.arguments(),
        result,
        weight.outputs,
        weight.inputs,
        weight.rows,
        **weight.constants(),
        MIDDLE=weight.middle,
        ASM=text,
        CONSTRAINTS=constraints,
        DTYPE=TRITON[result.dtype],
        INTERPRET=triton.knobs.runtime.interpret,
        ROWS=_ROWS,
        num_warps=4,
    )
    return result


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
