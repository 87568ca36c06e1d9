"""Activations to 8 bits: one byte a value, one scale a token, and for LLM.int8 the columns that stay in 16 bit.

Layout   x [tokens, inputs] 16 bit, rows contiguous -> codes [tokens, columns], scales float32 [tokens, 1 or blocks]
         columns = inputs rounded up to 128, padded with zeros
Meaning  `Format.served_inputs` of the weight's format
Limits   at most 65,536 inputs

LLM.int8's outlier columns are listed in `outliers` int32 [1 + columns]: how many, then which, in ascending order. A
matmul then visits exactly these, however many they are: no bound, and no host in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.linear.eight_bit import EightBitWeight

_MOST_INPUTS = 65536
_ONE_LAUNCH = 8  # tokens up to which every program looks for outliers in all of them, instead of a kernel before
_MOST_SHARES = 16  # programs that look for outliers in one group of columns
_TOKENS = 32
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to whole numbers, halves to even


@dataclass(frozen=True)
class QuantizedRows:
    """Activations as the 8-bit matmul reads them."""

    codes: Tensor
    scales: Tensor
    outliers: Tensor | None


@triton.jit(do_not_specialize=("tokens", "share"))
def _find_outliers(
    x, flags, tokens, share, inputs, columns, x_stride, threshold, COLUMNS: tl.constexpr, TOKENS: tl.constexpr
):
    """flags[i, column] = whether any token of share i has an outlier there."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * share
    found = tl.zeros((COLUMNS,), tl.int32)
    for start in range(first, tl.minimum(first + share, tokens), TOKENS):
        row = (start + tl.arange(0, TOKENS))[:, None]
        mask = (row < tokens) & (column < inputs)[None, :]
        value = tl.load(x + row.to(tl.int64) * x_stride + column[None, :], mask=mask, other=0.0)
        found = tl.maximum(found, tl.max(_is_outlier(value, threshold), axis=0))
    tl.store(flags + tl.program_id(1) * columns + column, found.to(tl.uint8))


@triton.jit
def _is_outlier(value, threshold):
    """As bitsandbytes, which sees float16."""
    return (tl.abs(value.to(tl.float16).to(tl.float32)) >= threshold).to(tl.int32)


@triton.jit(do_not_specialize=("tokens", "shares"))
def _quantize_rows(
    x,
    codes,
    scales,
    flags,
    outliers,
    input_scale,
    tokens,
    shares,
    inputs,
    columns,
    x_stride,
    threshold,
    ACTIVATIONS: tl.constexpr,
    FLOAT8: tl.constexpr,
    FIND: tl.constexpr,
    INTERPRET: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < inputs
    value = tl.load(x + token.to(tl.int64) * x_stride + column, mask=inside, other=0.0)
    stored = codes + token.to(tl.int64) * columns + column
    if ACTIVATIONS == "outliers":
        found = tl.zeros((WIDTH,), tl.int32)
        if FIND:
            for other in range(tokens):
                row = tl.load(x + other * x_stride + column, mask=inside, other=0.0)
                found = tl.maximum(found, _is_outlier(row, threshold))
        else:
            for share in range(shares):
                flag = tl.load(flags + share * columns + column, mask=column < columns, other=0)
                found = tl.maximum(found, flag.to(tl.int32))
        if token == 0:
            tl.store(outliers + tl.cumsum(found, axis=0), column, mask=found > 0)
            tl.store(outliers, tl.sum(found, axis=0))
        half = tl.where(found > 0, 0.0, value.to(tl.float16).to(tl.float32))
        largest = tl.max(tl.abs(half), axis=0)
        code = half * tl.div_rn(127.0, tl.maximum(largest, 1e-30))
        tl.store(stored, ((code + _ROUND) - _ROUND).to(tl.int8), mask=column < columns)
        tl.store(scales + token, tl.div_rn(largest, 127.0))
    elif ACTIVATIONS == "block":
        blocks: tl.constexpr = WIDTH // 128
        value = tl.reshape(value.to(tl.float32), (blocks, 128))
        largest = tl.max(tl.abs(value), axis=1)
        scale = tl.div_rn(tl.where(largest == 0, 448.0, largest), 448.0)
        code = tl.reshape(tl.div_rn(value, tl.broadcast_to(scale[:, None], (blocks, 128))), (WIDTH,))
        _store_float8(stored, code, column < columns, INTERPRET)
        block = tl.arange(0, blocks)
        tl.store(scales + token * (columns // 128) + block, scale, mask=block < columns // 128)
    else:
        value = value.to(tl.float32)
        if ACTIVATIONS == "static":
            scale = tl.load(input_scale)
        elif FLOAT8:
            largest = tl.max(tl.abs(value), axis=0)
            scale = tl.div_rn(tl.where(largest == 0, 448.0, largest), 448.0)
        else:
            largest = tl.max(tl.abs(value), axis=0)
            scale = tl.div_rn(tl.where(largest == 0, 1.0, largest), 127.5)
        code = tl.div_rn(value, scale)
        if FLOAT8:
            _store_float8(stored, code, column < columns, INTERPRET)
        else:
            code = tl.minimum(tl.maximum(code, -128.0), 127.0)
            tl.store(stored, ((code + _ROUND) - _ROUND).to(tl.int8), mask=column < columns)
        tl.store(scales + token, scale)


@triton.jit
def _store_float8(place, value, mask, INTERPRET: tl.constexpr):
    value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    if INTERPRET:  # which cuts off instead of rounding to 4 significant bits, or to multiples of 2**-9
        bits = value.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        tiny = (value * 512.0 + _ROUND - _ROUND) / 512.0
        value = tl.where(tl.abs(value) < 0.015625, tiny, normal)
    tl.store(place, value.to(tl.float8e4nv), mask=mask)


def quantize_rows(x: Tensor, weight: EightBitWeight) -> QuantizedRows:
    """x as `weight.activations` says. The arguments are those that the matmul has checked."""
    tokens, inputs = x.shape
    if inputs > _MOST_INPUTS:
        raise InputError(f"8-bit matmul: {inputs} inputs, but at most {_MOST_INPUTS} fit one program")
    columns = weight.columns
    blocks = columns // 128 if weight.activations == "block" else 1
    codes = torch.empty(tokens, columns, dtype=weight.values.dtype, device=x.device)
    scales = torch.empty(tokens, blocks, dtype=torch.float32, device=x.device)
    flags = outliers = None
    find = tokens <= _ONE_LAUNCH
    share = triton.cdiv(triton.cdiv(tokens, _MOST_SHARES), _TOKENS) * _TOKENS
    shares = triton.cdiv(tokens, share)
    if weight.activations == "outliers":
        outliers = torch.empty(1 + columns, dtype=torch.int32, device=x.device)
        if not find:
            flags = torch.empty(shares, columns, dtype=torch.uint8, device=x.device)
            _find_outliers[(columns // 128, shares)](
                x, flags, tokens, share, inputs, columns, x.stride(0), weight.threshold, COLUMNS=128, TOKENS=_TOKENS
            )
    width = triton.next_power_of_2(columns)
    _quantize_rows[(tokens,)](
        x,
        codes,
        scales,
        flags,
        outliers,
        weight.input_scale,
        tokens,
        shares,
        inputs,
        columns,
        x.stride(0),
        weight.threshold,
        ACTIVATIONS=weight.activations,
        FLOAT8=weight.kind == "fp8",
        FIND=find,
        INTERPRET=triton.knobs.runtime.interpret,
        WIDTH=width,
        num_warps=max(4, min(16, width // 1024)),
    )
    return QuantizedRows(codes, scales, outliers)
