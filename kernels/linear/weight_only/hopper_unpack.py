"""What the Gluon kernel of `hopper.py` does with packed weights: ask for them, load them, decode them.

As `unpack.py`, in Gluon: every value stays in the thread that loaded its word.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_EIGHT_BF16 = gl.constexpr((gl.bfloat16,) * 8)
_EIGHT_FP16 = gl.constexpr((gl.float16,) * 8)


@gluon.jit
def _to_cache(pointer, count, BYTES: gl.constexpr):
    """Some numbers of so many bytes on their way to the second-level cache, asked for by one thread."""
    gl.inline_asm_elementwise(
        "{\n.reg .pred p;\n.reg .b32 t;\nmov.u32 t, %laneid;\nsetp.eq.u32 p, t, 0;\n"
        "@p cp.async.bulk.prefetch.L2.global [$1], $2;\nmov.u32 $0, 0;\n}",
        "=r,l,r",
        [pointer.to(gl.int64), count * BYTES],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch(
    words,
    high,
    scales,
    zeros,
    chunk,
    down,
    rows,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    ONE_GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """All that `load_words` will ask for in a tile."""
    parts: gl.constexpr = 128 // GROUP if GROUP < 128 else 1
    per_word: gl.constexpr = parts if parts < 4 else 4
    first = down * (64 * GROUPS)
    count = gl.minimum(64 * GROUPS, rows - first)
    at = (chunk * rows + first) * 16
    _to_cache(words + at, count, words.dtype.element_ty.primitive_bitwidth * 2)
    if KIND == "int3" or KIND == "int8":
        _to_cache(high + at, count, high.dtype.element_ty.primitive_bitwidth * 2)
    if not ONE_GROUP:
        group = chunk * 128 // GROUP
        for part in gl.static_range(parts):
            _to_cache(scales + (group + part) * rows + first, count, scales.dtype.element_ty.primitive_bitwidth // 8)
        if HAS_ZEROS:
            for word in gl.static_range(parts // per_word):
                _to_cache(zeros + (group // per_word + word) * rows + first, count, 4)


@gluon.jit
def load_words(
    words,
    high,
    scales,
    zeros,
    chunk,
    first,
    row,
    lane,
    rows,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    ONE_GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
):
    """What a chunk of 64 outputs is decoded from, as it is stored."""
    parts: gl.constexpr = 128 // GROUP if GROUP < 128 else 1
    per_word: gl.constexpr = parts if parts < 4 else 4
    at = (chunk * rows + first) * 16
    low = gl.load(words + at + lane)
    above = low
    if KIND == "int3" or KIND == "int8":
        above = gl.load(high + at + lane)
    group = 0 if ONE_GROUP else chunk * 128 // GROUP
    factors = ()
    origins = ()
    for part in gl.static_range(parts):
        factors += (gl.load(scales + (group + part) * rows + first + row),)  # type: ignore[assignment]
    if HAS_ZEROS:
        for word in gl.static_range(parts // per_word):
            origins += (gl.load(zeros + (group // per_word + word) * rows + first + row),)  # type: ignore[assignment]
    return low, above, factors, origins


@gluon.jit
def finish_scales(
    factors,
    nested_table,
    nested_scales,
    nested_offsets,
    chunk,
    first,
    row,
    groups,
    GROUP: gl.constexpr,
    ONE_GROUP: gl.constexpr,
    NESTED_EVERY: gl.constexpr,
    WHOLE_CHUNKS: gl.constexpr,
):
    """Scales of 8 bits through their table; others as they are."""
    found = ()
    if NESTED_EVERY > 0:
        group = 0 if ONE_GROUP else chunk * 128 // GROUP
        offset = gl.load(nested_offsets + first // 128)
        shared: gl.constexpr = WHOLE_CHUNKS and NESTED_EVERY % len(factors) == 0  # rows begin with a chunk
        for part in gl.static_range(len(factors)):
            if part == 0 or not shared:
                block = ((first + row) * groups + (group + part)).to(gl.uint32) // NESTED_EVERY
                second = gl.load(nested_scales + block)
            scale = gl.load(nested_table + factors[part].to(gl.int32)) * second
            found += (scale + offset,)  # type: ignore[assignment]
    else:
        found = factors
    return found


@gluon.jit
def decode(
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
    """Scaled weights [64, 128] as a register operand."""
    origins = ()
    for part in gl.static_range(len(factors) if len(zeros) > 0 else 0):
        origins += (gl.expand_dims(zeros[part // 4] >> (part % 4 * 8), 1).broadcast_to((64, 16)),)  # type: ignore[assignment]
    if KIND == "int3":
        operands = (words, high.to(gl.int16)) + origins
    elif KIND == "int8":
        operands = (words, high) + origins
    else:
        operands = (words,) + origins  # type: ignore[assignment]
    if DTYPE == gl.bfloat16:
        slabs = gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=_EIGHT_BF16, is_pure=True, pack=2)
    else:
        slabs = gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=_EIGHT_FP16, is_pure=True, pack=2)
    scaled = ()
    for slab in gl.static_range(8):
        factor = factors[slab * len(factors) // 8].to(gl.float32).to(DTYPE)
        factor = gl.expand_dims(factor, 1).broadcast_to((64, 16))
        scaled += (_multiply(slabs[slab], factor, DTYPE),)  # type: ignore[assignment]
    return _joined(scaled, LAYOUT)


@gluon.jit
def _joined(slabs, LAYOUT: gl.constexpr):
    """Eight slabs [64, 16] side by side."""
    even = gl.join(gl.join(slabs[0], slabs[4]), gl.join(slabs[2], slabs[6]))
    odd = gl.join(gl.join(slabs[1], slabs[5]), gl.join(slabs[3], slabs[7]))
    joined = gl.join(even, odd)  # [64, lane, slab bit 2, bit 1, bit 0]
    return gl.convert_layout(joined.permute((0, 2, 3, 4, 1)).reshape((64, 128)), LAYOUT, assert_trivial=True)


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
