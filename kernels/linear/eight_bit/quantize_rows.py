"""Activations to 8 bits: one byte a value, one scale a token, and for LLM.int8 the columns that stay in 16 bit.

Layout   x [tokens, inputs] 16 bit, rows contiguous -> codes [tokens, columns], scales float32 [tokens, 1 or blocks],
         the tokens side by side in memory
         columns = inputs rounded up to 128, padded with zeros
Meaning  `Format.served_inputs` of the weight's format
Limits   at most 65,536 inputs

LLM.int8's outlier columns are listed in `outliers`, and for many tokens copied too: see `outliers.py`. A matmul then
visits exactly these, however many they are: no bound, and no host in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.card import card_of
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.digits import ROUND
from quantkit.kernels.linear.eight_bit.outliers import (
    FEW_TOKENS,
    MOST_INPUTS,
    DenseOutliers,
    find_few,
    is_outlier,
    split_columns,
    store_bytes,
    warps_of_row,
    without_outliers,
)
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight

_ONE_LAUNCH = 8  # tokens up to which every program looks for outliers in all of them, instead of a kernel before
_MOST_HELD = 16384  # columns of a row that one program holds in registers; longer rows are read in pieces
_BYTES_TO_LIST = 8.1  # of shared memory, for each column that `tl.cumsum` counts


@dataclass(frozen=True)
class QuantizedRows:
    """Activations as the 8-bit matmul reads them."""

    codes: Tensor
    scales: Tensor
    outliers: Tensor | None
    dense: DenseOutliers | None  # only of more than FEW_TOKENS tokens, and only where asked for


@triton.jit
def _outlier_columns(x, flags, column, tokens, shares, inputs, columns, x_stride, threshold, FIND: tl.constexpr):
    """1 where any token has an outlier in this column: of all tokens' values, or of what a kernel before has found."""
    found = tl.zeros(column.shape, tl.int32)
    if FIND:
        for other in range(tokens):
            row = tl.load(x + other * x_stride + column, mask=column < inputs, other=0.0)
            found = tl.maximum(found, is_outlier(row, threshold))
    else:
        for share in range(shares):
            flag = tl.load(flags + share * columns + column, mask=column < columns, other=0)
            found = tl.maximum(found, flag.to(tl.int32))
    return found


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
    EMULATED: tl.constexpr,
    INTERPRET: tl.constexpr,
    PIECE: tl.constexpr,
    SLICE: tl.constexpr,
    WHOLE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (i, j) writes slice j of token i; what the whole row decides, every program finds out for itself, unless
    its slice is the whole row."""
    wait_for_last(CHAINED)
    token = tl.program_id(0)
    begin = x + token.to(tl.int64) * x_stride
    first = tl.program_id(1) * SLICE
    column = first + tl.arange(0, SLICE)
    value = tl.load(begin + column, mask=column < inputs, other=0.0)
    stored = codes + token.to(tl.int64) * columns + column
    if ACTIVATIONS == "outliers":
        if WHOLE:
            found = _outlier_columns(x, flags, column, tokens, shares, inputs, columns, x_stride, threshold, FIND)
            largest = tl.max(tl.abs(without_outliers(value, found)), axis=0)
            before, count = 0, tl.sum(found, axis=0)
        else:
            before, count, largest = 0, 0, 0.0
            for start in range(0, columns, PIECE):
                of_row = start + tl.arange(0, PIECE)
                row = tl.load(begin + of_row, mask=of_row < inputs, other=0.0)
                found = _outlier_columns(x, flags, of_row, tokens, shares, inputs, columns, x_stride, threshold, FIND)
                largest = tl.maximum(largest, tl.max(tl.abs(without_outliers(row, found)), axis=0))
                count += tl.sum(found, axis=0)
                before += tl.sum(tl.where(of_row < first, found, 0), axis=0)
            found = _outlier_columns(x, flags, column, tokens, shares, inputs, columns, x_stride, threshold, FIND)
        if token == 0:
            if first == 0:
                tl.store(outliers, count)
            if count > 0:
                tl.store(outliers + before + tl.cumsum(found, axis=0), column, mask=found > 0)
        store_bytes(without_outliers(value, found), largest, stored, column < columns)
        tl.store(scales + token, tl.div_rn(largest, 127.0))
    elif ACTIVATIONS == "block":
        blocks: tl.constexpr = SLICE // 128
        value = tl.reshape(value.to(tl.float32), (blocks, 128))
        largest = tl.max(tl.abs(value), axis=1)
        scale = tl.div_rn(tl.where(largest == 0, 448.0, largest), 448.0)
        code = tl.reshape(tl.div_rn(value, tl.broadcast_to(scale[:, None], (blocks, 128))), (SLICE,))
        _store_float8(stored, code, column < columns, EMULATED, INTERPRET)
        block = first // 128 + tl.arange(0, blocks)
        tl.store(scales + block * tokens + token, scale, mask=block < columns // 128)
    else:
        if ACTIVATIONS == "static":
            scale = tl.load(input_scale)
        else:
            largest = tl.max(tl.abs(value.to(tl.float32)), axis=0)
            if not WHOLE:
                for start in range(0, columns, PIECE):
                    of_row = start + tl.arange(0, PIECE)
                    row = tl.load(begin + of_row, mask=of_row < inputs, other=0.0)
                    largest = tl.maximum(largest, tl.max(tl.abs(row.to(tl.float32)), axis=0))
            if FLOAT8:
                scale = tl.div_rn(tl.where(largest == 0, 448.0, largest), 448.0)
            else:
                scale = tl.div_rn(tl.where(largest == 0, 1.0, largest), 127.5)
        code = tl.div_rn(value.to(tl.float32), scale)
        if FLOAT8:
            _store_float8(stored, code, column < columns, EMULATED, INTERPRET)
        else:
            code = tl.minimum(tl.maximum(code, -128.0), 127.0)
            tl.store(stored, ((code + ROUND) - ROUND).to(tl.int8), mask=column < columns)
        tl.store(scales + token, scale)


@triton.jit
def _store_float8(place, value, mask, EMULATED: tl.constexpr, INTERPRET: tl.constexpr):
    if EMULATED:
        tl.store(place, rounded_to_float8(value), mask=mask)
    else:
        tl.store(place, to_float8(value, INTERPRET), mask=mask)


@triton.jit
def to_float8(value, INTERPRET: tl.constexpr):
    if INTERPRET:  # which on its own cuts off
        return rounded_to_float8(value).to(tl.float8e4nv)
    else:
        return tl.minimum(tl.maximum(value, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def rounded_to_float8(value):
    """The nearest number that float8 has, in float32: of 4 significant bits, or a multiple of 2**-9."""
    value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    tiny = (value * 512.0 + ROUND - ROUND) / 512.0
    return tl.where(tl.abs(value) < 0.015625, tiny, normal)


def quantize_rows(
    x: Tensor, weight: EightBitWeight, *, emulated: bool = False, outliers_copied: bool = True
) -> QuantizedRows:
    """x as `weight.activations` says. The arguments are those that the matmul has checked.

    `emulated`: numbers of float8 come in the dtype of x, for cards that have no float8.
    """
    tokens, inputs = x.shape
    if inputs > MOST_INPUTS:
        raise InputError(f"8-bit matmul: {inputs} inputs, but at most {MOST_INPUTS} fit one program")
    columns = weight.columns
    blocks = columns // 128 if weight.activations == "block" else 1
    codes = torch.empty(tokens, columns, dtype=x.dtype if emulated else weight.values.dtype, device=x.device)
    scales = torch.empty(blocks, tokens, dtype=torch.float32, device=x.device).mT
    flags = outliers = None
    if weight.activations == "outliers":
        if tokens > FEW_TOKENS:
            return QuantizedRows(codes, scales, *split_columns(x, weight, codes, scales, copied=outliers_copied))
        outliers = torch.empty(1 + columns, dtype=torch.int32, device=x.device)
        flags = find_few(x, weight) if tokens > _ONE_LAUNCH else None
    piece = min(triton.next_power_of_2(columns), _MOST_HELD)
    part = _slice(piece, tokens, weight.activations)
    if weight.activations == "outliers":
        part = min(part, _most_listed(x.device))
    _quantize_rows[(tokens, triton.cdiv(columns, part))](
        x,
        codes,
        scales,
        flags,
        outliers,
        weight.input_scale,
        tokens,
        0 if flags is None else flags.shape[0],
        inputs,
        columns,
        x.stride(0),
        weight.threshold,
        ACTIVATIONS=weight.activations,
        FLOAT8=weight.code_type == "fp8",
        FIND=tokens <= _ONE_LAUNCH,
        EMULATED=emulated,
        INTERPRET=triton.knobs.runtime.interpret,
        PIECE=piece,
        SLICE=part,
        WHOLE=part >= columns,
        num_warps=warps_of_row(part, tokens) if part == piece else 8,
        **chained(x.device),
    )
    return QuantizedRows(codes, scales, outliers, None)


def _most_listed(device: torch.device) -> int:
    """Columns that one program can number with the shared memory of its GPU, a power of two."""
    return 1 << (int(card_of(device).shared / _BYTES_TO_LIST).bit_length() - 1)


def _slice(width: int, tokens: int, activations: str) -> int:
    """Columns of a token that one program writes (H200, one token of 14,336: 3.8 us in slices, 6.6 whole).

    Where a scale belongs to the whole row, every slice reads the row to find it, which pays for few tokens. With
    outliers they read what belongs to all tokens too, which pays for one token, and for some where another kernel has
    found them.
    """
    if activations in ("block", "static"):
        most = tokens
    elif activations == "outliers":
        most = 1 if tokens <= _ONE_LAUNCH else 16
    else:
        most = FEW_TOKENS
    return min(width, 1024 if tokens <= 8 else 2048) if tokens <= most else width
