"""One block of GPTQ's rounding on a GPU: up to 128 columns, one after the other, of several layers in a single launch.

Layout   block, scale, zero, codes, errors  [layers, columns, out]; factor [layers, columns, columns] in any layout
Meaning  `reference.gptq.round_columns`: round column i to its grid, divide the error by factor[i, i], subtract
         factor[i, j] * error from every later column j
Limits   at most 128 columns; float32 throughout

Every program owns some of the outputs and keeps their columns in registers: outputs do not depend on each other. The
same loop in torch costs about ten launches a column.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 128
_OUTPUTS = 32  # per program
_HALVES_TO_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to whole numbers


@triton.jit
def _round_block(
    block,
    scale,
    zero,
    factor,
    codes,
    errors,
    out,
    width,
    layers,
    rows,
    steps,
    top,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    layer = tl.program_id(1).to(tl.int64)
    start = layer * width * out
    block += start
    scale += start
    zero += start
    codes += start
    errors += start
    factor += layer * layers
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, COLUMNS)
    here = outputs < out
    place = columns[:, None] * out + outputs[None, :]
    weight = tl.load(block + place, mask=(columns[:, None] < width) & here[None, :], other=0.0)
    for i in range(width):
        later = tl.load(factor + i * rows + columns * steps, mask=(columns > i) & (columns < width), other=0.0)
        pivot = tl.load(factor + i * rows + i * steps)
        value = tl.sum(tl.where(columns[:, None] == i, weight, 0.0), axis=0)  # column i, [OUTPUTS]
        step = tl.load(scale + i * out + outputs, mask=here, other=1.0)
        origin = tl.load(zero + i * out + outputs, mask=here, other=0.0)
        code = (tl.div_rn(value, step) + _HALVES_TO_EVEN) - _HALVES_TO_EVEN + origin
        code = tl.minimum(tl.maximum(code, 0.0), top)
        error = tl.div_rn(value - (code - origin) * step, pivot)
        tl.store(codes + i * out + outputs, code.to(tl.uint8), mask=here)
        tl.store(errors + i * out + outputs, error, mask=here)
        weight -= later[:, None] * error[None, :]


def round_columns(block: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 and errors float32, both [layers, columns, out], of blocks of columns. Does not change `block`."""
    layers, width, out = block.shape
    assert width <= COLUMNS, f"{width} columns, at most {COLUMNS} fit"
    block = block.contiguous()
    codes = torch.empty_like(block, dtype=torch.uint8)
    errors = torch.empty_like(block)
    _round_block[(triton.cdiv(out, _OUTPUTS), layers)](
        block,
        scale.contiguous(),
        zero.contiguous(),
        factor,
        codes,
        errors,
        out,
        width,
        factor.stride(0),
        factor.stride(1),
        factor.stride(2),
        float(top),
        COLUMNS=COLUMNS,
        OUTPUTS=_OUTPUTS,
    )
    return codes, errors
