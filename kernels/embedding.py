"""Rows of the embedding table, times a factor where the family scales its embeddings.

Layout   ids [tokens]; table [vocab, width] and out [tokens, width], rows of any stride
Meaning  `reference.elementwise.embed`: the factor is rounded to the table's dtype, then the product is
Limits   ids int32 or int64; bfloat16, float16 or float32. An id outside the table gives a row of zeros: checking it on
         the host would stall the GPU
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.checks import HALVES, check_contiguous, check_dtype, check_rows, check_same_device, check_shape

_BLOCK = 1024


@triton.jit
def _gather(
    ids,
    table,
    out,
    table_stride,
    out_stride,
    vocab,
    width,
    factor,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_last(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    row = tl.load(ids + token).to(tl.int64)
    known = (row >= 0) & (row < vocab)
    value = tl.load(table + row * table_stride + columns, mask=here & known, other=0.0)
    if SCALED:
        value = (value.to(tl.float32) * factor).to(out.dtype.element_ty)
    tl.store(out + token * out_stride + columns, value, mask=here)


def embed(ids: Tensor, table: Tensor, *, scale: float | None = None, out: Tensor | None = None) -> Tensor:
    """table[ids] * scale, [tokens, width]."""
    check_dtype("embed", "ids", ids, (torch.int32, torch.int64))
    check_shape("embed", "ids", ids, (None,))
    check_contiguous("embed", "ids", ids)
    check_dtype("embed", "table", table, (*HALVES, torch.float32))
    check_shape("embed", "table", table, (None, None))
    check_rows("embed", "table", table)
    tokens, (vocab, width) = len(ids), table.shape
    out = torch.empty((tokens, width), dtype=table.dtype, device=table.device) if out is None else out
    check_dtype("embed", "out", out, (table.dtype,))
    check_shape("embed", "out", out, (tokens, width))
    check_rows("embed", "out", out)
    check_same_device("embed", ids=ids, table=table, out=out)
    if tokens == 0 or width == 0:
        return out
    _gather[(tokens, triton.cdiv(width, _BLOCK))](
        ids,
        table,
        out,
        table.stride(0),
        out.stride(0),
        vocab,
        width,
        1.0 if scale is None else float(torch.tensor(scale, dtype=table.dtype)),
        SCALED=scale is not None,
        BLOCK=_BLOCK,
        num_warps=4,
        **chained(table.device),
    )
    return out
