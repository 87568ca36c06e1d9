"""The product of two tiles as matrix units make it, and what stands for it under the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(weight, x, INTERPRET: tl.constexpr):
    if INTERPRET:  # where products of bfloat16 are wrong
        return tl.dot(weight.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(weight, x)
