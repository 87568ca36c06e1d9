"""Weight-only matmul for many tokens on Hopper: one warp group decodes while the other multiplies.

Layout   x [tokens, inputs] bfloat16 or float16, rows contiguous and 16-byte aligned; weight as in `packed.py`
Meaning  `reference.linear.linear`: y = x @ dequantize(weight).T + bias, accumulated in float32, weights rounded to x's
         dtype as a decoded weight would be
Limits   compute capability 9.0; Triton 3.6 or newer, whose Gluon language gives a kernel its warp groups. Triton's
         interpreter does not know Gluon: this kernel is tested on a GPU only, and `wide.py` stands in elsewhere

A warp that issues wgmma waits until the tensor core takes it, and cannot decode meanwhile: decoding and multiplying in
the same warps takes the sum of both times. Here two groups of four warps share a tile of x and have 64 outputs each;
while the products of one run, the other decodes its next chunk in registers. A third group fetches x. W4, 28,672 by
4,096 at 1,024 tokens on an H200: the same warps for both 371 us, four warps of their own for decoding 467, this way
347; cuBLAS with a bfloat16 weight 311.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quantkit.errors import InputError
from quantkit.kernels.linear.arguments import check_arguments
from quantkit.kernels.linear.assembly import PTX, assembly
from quantkit.kernels.linear.packed import CHUNK, PackedWeight

NAME = "Hopper matmul"
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its name before and since Triton 3.7
_OUTPUTS = 64  # of one group of warps
_REGISTERS = 232  # of the second group; the first takes what is left
_GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_EIGHT_BF16 = gl.constexpr((gl.bfloat16,) * 8)
_EIGHT_FP16 = gl.constexpr((gl.float16,) * 8)


@dataclass(frozen=True)
class HopperConfig:
    """Tokens of a tile (64 to 256), and how many chunks of x are on their way."""

    tokens: int = 256
    stages: int = 3


@gluon.jit
def _load_zeros(stored, chunk, row, rows, GROUP: gl.constexpr, ONE_GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr):
    """As `unpack.load_zeros`."""
    parts: gl.constexpr = 128 // GROUP if GROUP < 128 else 1
    words: gl.constexpr = (parts + 3) // 4
    first = 0 if ONE_GROUP else (chunk * 128 // GROUP if GROUP >= 128 else chunk * words)
    found = ()
    if HAS_ZEROS:
        for part in gl.static_range(parts):
            if part % 4 == 0:
                word = gl.load(stored + (first + part // 4) * rows + row)
            found += (gl.expand_dims(word >> (part % 4 * 8), 1).broadcast_to((64, 16)),)  # type: ignore[assignment]
    return found


@gluon.jit
def _load_scales(
    stored,
    nested_table,
    nested_scales,
    nested_offset,
    chunk,
    row,
    rows,
    groups,
    GROUP: gl.constexpr,
    ONE_GROUP: gl.constexpr,
    NESTED_EVERY: gl.constexpr,
):
    """As `unpack.load_scales`."""
    first = 0 if ONE_GROUP else chunk * 128 // GROUP
    found = ()
    for part in gl.static_range(128 // GROUP if GROUP < 128 else 1):
        scale = gl.load(stored + (first + part) * rows + row)
        if NESTED_EVERY > 0:
            block = (row * groups + (first + part)) // NESTED_EVERY
            scale = gl.load(nested_table + scale.to(gl.int32)) * gl.load(nested_scales + block) + nested_offset
        found += (scale.to(gl.float32),)  # type: ignore[assignment]
    return found


@gluon.jit
def _decode(
    words,
    high,
    zeros,
    factors,
    KIND: gl.constexpr,
    DTYPE: gl.constexpr,
    ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Scaled weights [64, 128] as a register operand: values stay in the threads that loaded their words."""
    if KIND == "int3":
        operands = (words, high.to(gl.int16)) + zeros
    elif KIND == "int8":
        operands = (words, high) + zeros
    else:
        operands = (words,) + zeros
    if DTYPE == gl.bfloat16:
        slabs = gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=_EIGHT_BF16, is_pure=True, pack=2)
    else:
        slabs = gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=_EIGHT_FP16, is_pure=True, pack=2)
    scaled = ()
    for slab in gl.static_range(8):
        factor = factors[slab * len(factors) // 8].to(DTYPE)
        factor = gl.expand_dims(factor, 1).broadcast_to((64, 16))
        scaled += (_multiply(slabs[slab], factor, DTYPE),)  # type: ignore[assignment]
    return _joined(scaled, LAYOUT)


@gluon.jit
def _joined(scaled, LAYOUT: gl.constexpr):
    even = gl.join(gl.join(scaled[0], scaled[4]), gl.join(scaled[2], scaled[6]))
    odd = gl.join(gl.join(scaled[1], scaled[5]), gl.join(scaled[3], scaled[7]))
    joined = gl.join(even, odd)  # [64, lane, slab bit 2, bit 1, bit 0]
    weight = joined.permute((0, 2, 3, 4, 1)).reshape((64, 128))
    return gl.convert_layout(weight, LAYOUT, assert_trivial=True)


@gluon.jit
def _multiply(value, other, DTYPE: gl.constexpr):
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "mul.bf16x2 $0, $1, $2;", "=r,r,r", [value, other], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "mul.f16x2 $0, $1, $2;", "=r,r,r", [value, other], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _consume(
    x_smem,
    x_full,
    x_empty,
    words,
    high,
    scales,
    zeros,
    nested_table,
    nested_scales,
    nested_offsets,
    bias,
    y,
    first,
    first_token,
    tokens,
    outputs,
    rows,
    chunks,
    groups,
    y_stride,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    ONE_GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    NESTED_EVERY: gl.constexpr,
    ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """64 outputs of a tile: decode a chunk, multiply it, and ask for the next words before waiting."""
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product, k_width=2)
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, operand))
    nested_offset = 0.0
    if NESTED_EVERY > 0:
        nested_offset = gl.load(nested_offsets + first // 128)
    place = row[:, None] * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, operand))[None, :]
    next_words = gl.load(words + place)
    next_high = next_words
    if KIND == "int3" or KIND == "int8":
        next_high = gl.load(high + place)
    next_zeros = _load_zeros(zeros, 0, row, rows, GROUP, ONE_GROUP, HAS_ZEROS)
    next_factors = _load_scales(scales, nested_table, nested_scales, nested_offset, 0, row, rows, groups, GROUP,
                                ONE_GROUP, NESTED_EVERY)  # fmt: skip
    acc = warpgroup_mma_init(gl.zeros((64, TOKENS), gl.float32, layout=product))
    for chunk in range(chunks):
        weight = _decode(next_words, next_high, next_zeros, next_factors, KIND, DTYPE, ASM, CONSTRAINTS, operand)
        following = gl.minimum(chunk + 1, chunks - 1)
        next_words = gl.load(words + following * rows * 16 + place)
        next_high = next_words
        if KIND == "int3" or KIND == "int8":
            next_high = gl.load(high + following * rows * 16 + place)
        next_zeros = _load_zeros(zeros, following, row, rows, GROUP, ONE_GROUP, HAS_ZEROS)
        next_factors = _load_scales(scales, nested_table, nested_scales, nested_offset, following, row, rows, groups,
                                    GROUP, ONE_GROUP, NESTED_EVERY)  # fmt: skip
        stage = chunk % STAGES
        mbarrier.wait(x_full.index(stage), (chunk // STAGES) & 1)
        acc = warpgroup_mma(weight, x_smem.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weight))[0]
        acc = warpgroup_mma_init(acc)
        _barrier()  # all four warps are done with this stage
        mbarrier.arrive(x_empty.index(stage), count=1)
    result = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, product))
    token = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, product))
    if HAS_BIAS:
        result += gl.load(bias + row, mask=row < outputs, other=0.0).to(gl.float32)[:, None]
    gl.store(
        y + token[None, :].to(gl.int64) * y_stride + row[:, None],
        result.to(DTYPE),
        mask=(token < tokens)[None, :] & (row < outputs)[:, None],
    )


@gluon.jit
def _produce(x, x_smem, x_full, x_empty, first_token, chunks, TOKENS: gl.constexpr, STAGES: gl.constexpr):
    """Chunks of x to shared memory, as far ahead as there are stages."""
    for chunk in range(chunks):
        stage = chunk % STAGES
        mbarrier.wait(x_empty.index(stage), ((chunk // STAGES) & 1) ^ 1)
        mbarrier.expect(x_full.index(stage), TOKENS * 128 * 2)
        tma.async_copy_global_to_shared(x, [first_token, chunk * 128], x_full.index(stage), x_smem.index(stage))


@gluon.jit(do_not_specialize=("tokens", "chunks"))
def _hopper(
    x,
    words,
    high,
    scales,
    zeros,
    nested_table,
    nested_scales,
    nested_offsets,
    bias,
    y,
    tokens,
    outputs,
    rows,
    chunks,
    groups,
    y_stride,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    ONE_GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    NESTED_EVERY: gl.constexpr,
    ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr,
    DTYPE: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    first_token = gl.program_id(0) * TOKENS
    first = gl.program_id(1) * 128
    x_smem = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, 128], x.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(x_full.index(stage), count=1)
        mbarrier.init(x_empty.index(stage), count=2)  # both groups have read it
    fence_async_shared()
    _barrier()
    gl.warp_specialize([
        (_consume, (x_smem, x_full, x_empty, words, high, scales, zeros, nested_table, nested_scales, nested_offsets,
                    bias, y, first, first_token, tokens, outputs, rows, chunks, groups, y_stride, KIND, GROUP,
                    ONE_GROUP, HAS_ZEROS, HAS_BIAS, NESTED_EVERY, ASM, CONSTRAINTS, DTYPE, TOKENS, STAGES)),
        (_consume, (x_smem, x_full, x_empty, words, high, scales, zeros, nested_table, nested_scales, nested_offsets,
                    bias, y, first + 64, first_token, tokens, outputs, rows, chunks, groups, y_stride, KIND, GROUP,
                    ONE_GROUP, HAS_ZEROS, HAS_BIAS, NESTED_EVERY, ASM, CONSTRAINTS, DTYPE, TOKENS, STAGES)),
        (_produce, (x, x_smem, x_full, x_empty, first_token, chunks, TOKENS, STAGES)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


def supports(weight: PackedWeight) -> bool:
    """Hopper only: wgmma is gone from the chips after it."""
    return weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) == (9, 0)


def matmul(
    x: Tensor, weight: PackedWeight, config: HopperConfig, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """y [tokens, outputs] in x's dtype."""
    check_arguments(NAME, x, weight, bias, out)
    if not supports(weight):
        raise InputError(f"{NAME}: needs a GPU of compute capability 9.0, the weight is on {weight.device}")
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    y = x.new_empty(x.shape[0], weight.outputs) if out is None else out
    if x.shape[0] == 0:
        return y
    x = _aligned(x)
    dtype = _GLUON[x.dtype]
    text, constraints = assembly(weight.kind, PTX[x.dtype], weight.table_values, weight.zero_points)
    layout = gl.NVMMASharedLayout.get_default_for([config.tokens, CHUNK], dtype)
    nested = weight.nested
    _hopper[(triton.cdiv(x.shape[0], config.tokens), triton.cdiv(weight.outputs, 2 * _OUTPUTS))](
        TensorDescriptor.from_tensor(x, [config.tokens, CHUNK], layout),
        weight.words,
        weight.high,
        nested.codes if nested else weight.scales,
        weight.zeros,
        nested.table if nested else None,
        nested.scales if nested else None,
        nested.offsets if nested else None,
        bias,
        y,
        x.shape[0],
        weight.outputs,
        weight.rows,
        weight.chunks,
        1 if weight.one_group else weight.inputs // weight.group,
        y.stride(0),
        **weight.constants(),
        HAS_BIAS=bias is not None,
        ASM=text,
        CONSTRAINTS=constraints,
        DTYPE=dtype,
        TOKENS=config.tokens,
        STAGES=config.stages,
        REGISTERS=_REGISTERS,
        num_warps=4,
    )
    return y


def _aligned(x: Tensor) -> Tensor:
    """Rows that the copy engine can take: they begin at multiples of 16 bytes."""
    if x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    whole = x.new_zeros(x.shape[0], -(-x.shape[1] // 8) * 8)
    whole[:, : x.shape[1]] = x
    return whole
