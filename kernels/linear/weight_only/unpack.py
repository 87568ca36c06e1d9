"""Decoding inside a kernel: from packed lanes to slabs of 16-bit values, and the scales that belong to them.

Branches that return are if/else chains: Triton compiles what stands behind a return too.
"""

from __future__ import annotations

import triton
import triton.language as tl

_EIGHT_BF16 = tl.constexpr((tl.bfloat16,) * 8)
_EIGHT_FP16 = tl.constexpr((tl.float16,) * 8)


@triton.jit
def decode_slabs(
    words,
    high,
    zeros,
    table,
    KIND: tl.constexpr,
    MIDDLE: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Eight tensors [rows, 16] of code - zero (integers) or table values, exact in DTYPE; not yet scaled.

    `zeros` are as many int32 [rows, 1] as the chunk has groups, the zero points in their low bytes; none: MIDDLE.
    """
    if INTERPRET:
        return _decode_plainly(words, high, zeros, table, KIND, MIDDLE, DTYPE)
    elif KIND == "int3":
        return _run(ASM, CONSTRAINTS, (words, high.to(tl.int16)) + zeros, DTYPE)
    elif KIND == "int8":
        return _run(ASM, CONSTRAINTS, (words, high) + zeros, DTYPE)
    else:
        return _run(ASM, CONSTRAINTS, (words,) + zeros, DTYPE)


@triton.jit
def place_pairs(TEXT: tl.constexpr):
    """Puts the table of pairs (`assembly.pair_table`) where `decode_slabs` looks values up; no text: none is needed."""
    if TEXT != "":
        tl.inline_asm_elementwise(TEXT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _run(ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, operands, DTYPE: tl.constexpr):
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=_EIGHT_BF16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=_EIGHT_FP16, is_pure=True, pack=2)


@triton.jit
def to_half(value, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 rounded to 16 bits; Triton's interpreter on its own cuts bfloat16 off instead of rounding it."""
    if INTERPRET and DTYPE == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def _decode_plainly(words, high, zeros, table, KIND: tl.constexpr, MIDDLE: tl.constexpr, DTYPE: tl.constexpr):
    """The same without assembly, for the interpreter."""
    slabs = ()
    for slab in tl.static_range(8):
        if KIND == "nf4" or KIND == "fp4" or KIND == "e2m1":
            value = tl.load(table + ((words >> (4 * slab)) & 15))
        else:
            zero = (zeros[slab * len(zeros) // 8] & 255) if len(zeros) > 0 else MIDDLE
            value = (_plain_code(words, high, slab, KIND) - zero).to(tl.float32)
        slabs += (to_half(value, DTYPE, True),)  # type: ignore[assignment]
    return slabs


@triton.jit
def _plain_code(words, high, slab: tl.constexpr, KIND: tl.constexpr):
    if KIND == "int4":
        return (words >> (4 * slab)) & 15
    elif KIND == "int8":
        return (((words if slab < 4 else high) >> (8 * (slab % 4))) & 255) ^ 128
    elif KIND == "int2":
        return (words.to(tl.int32) >> (2 * slab)) & 3
    else:
        return ((words.to(tl.int32) >> (2 * slab)) & 3) | (((high.to(tl.int32) >> slab) & 1) << 2)


@triton.jit
def operand(slabs, part: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr):
    """Some neighbouring slabs [rows, 16] as one operand [rows, DEPTH]: every value stays in its thread."""
    first: tl.constexpr = part * (DEPTH // 16)
    if DEPTH == 16:
        return slabs[first]
    elif DEPTH == 32:
        return tl.reshape(tl.permute(tl.join(slabs[first], slabs[first + 1]), (0, 2, 1)), (ROWS, 32))
    elif DEPTH == 64:
        even = tl.join(slabs[first], slabs[first + 2])
        odd = tl.join(slabs[first + 1], slabs[first + 3])
        return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), (ROWS, 64))
    else:
        even = tl.join(tl.join(slabs[0], slabs[4]), tl.join(slabs[2], slabs[6]))
        odd = tl.join(tl.join(slabs[1], slabs[5]), tl.join(slabs[3], slabs[7]))
        joined = tl.join(even, odd)  # [rows, lane, slab bit 2, bit 1, bit 0]
        return tl.reshape(tl.permute(joined, (0, 2, 3, 4, 1)), (ROWS, 128))


@triton.jit
def multiply(value, other, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """Two 16-bit floats an instruction; the compiler on its own takes them one by one. Before sm_90 bfloat16 has no
    product alone; that plus -0 is the same."""
    if INTERPRET:
        return to_half(value.to(tl.float32) * other.to(tl.float32), DTYPE, True)
    elif DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{.reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z;}",
            "=r,r,r",
            [value, other],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            "mul.f16x2 $0, $1, $2;", "=r,r,r", [value, other], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def load_zeros(stored, chunk, row, rows, GROUP: tl.constexpr, ONE_GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """The zero points of every group of a chunk as `decode_slabs` takes them; none where they are the middle code."""
    parts: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    words: tl.constexpr = (parts + 3) // 4
    first = 0 if ONE_GROUP else (chunk * 128 // GROUP if GROUP >= 128 else chunk * words)
    found = ()
    if HAS_ZEROS:
        for part in tl.static_range(parts):
            if part % 4 == 0:
                word = tl.load(stored + (first + part // 4) * rows + row)
            found += ((word >> (part % 4 * 8))[:, None],)  # type: ignore[assignment]
    return found


@triton.jit
def load_scales(
    stored,
    nested_table,
    nested_scales,
    nested_offset,
    chunk,
    row,
    rows,
    groups,
    GROUP: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    NESTED_EVERY: tl.constexpr,
):
    """The scales of every group of a chunk for some rows: a tuple of float32 [rows]; padded rows mean nothing.

    NESTED_EVERY, where not 0, says that bytes are stored, which the table and the scales of the second level turn into
    scales; it is how many of them share one of these.
    """
    raw = load_stored(stored, chunk, row, rows, GROUP, ONE_GROUP)
    return finish_scales(raw, nested_table, nested_scales, nested_offset, chunk, row, groups, GROUP, ONE_GROUP,
                         NESTED_EVERY, False)  # fmt: skip


@triton.jit
def load_stored(stored, chunk, row, rows, GROUP: tl.constexpr, ONE_GROUP: tl.constexpr):
    """The scales of a chunk as they are stored."""
    first = 0 if ONE_GROUP else chunk * 128 // GROUP
    found = ()
    for part in tl.static_range(128 // GROUP if GROUP < 128 else 1):
        found += (tl.load(stored + (first + part) * rows + row),)  # type: ignore[assignment]
    return found


@triton.jit
def finish_scales(
    raw,
    nested_table,
    nested_scales,
    nested_offset,
    chunk,
    row,
    groups,
    GROUP: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    NESTED_EVERY: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
):
    """What `load_stored` found as scales. In WHOLE_CHUNKS rows begin with a chunk: its groups share a second level."""
    first = 0 if ONE_GROUP else chunk * 128 // GROUP
    shared: tl.constexpr = WHOLE_CHUNKS and NESTED_EVERY % len(raw) == 0
    found = ()
    for part in tl.static_range(len(raw)):
        scale = raw[part]
        if NESTED_EVERY > 0:
            if part == 0 or not shared:
                block = (row * groups + (first + part)).to(tl.uint32) // NESTED_EVERY
                second = tl.load(nested_scales + block)
            scale = tl.load(nested_table + scale.to(tl.int32)) * second + nested_offset
        found += (scale.to(tl.float32),)  # type: ignore[assignment]
    return found


@triton.jit
def load_offset(nested_offsets, first_row, ROWS: tl.constexpr, NESTED_EVERY: tl.constexpr):
    """The offset of nested scales for a tile of outputs: a number, or one for each row of a tile of 256."""
    offset = 0.0
    if NESTED_EVERY > 0:
        offset = tl.load(nested_offsets + first_row // 128)
        if ROWS > 128:
            tl.static_assert(ROWS == 256)
            offset = tl.where(tl.arange(0, ROWS) < 128, offset, tl.load(nested_offsets + first_row // 128 + 1))
    return offset
