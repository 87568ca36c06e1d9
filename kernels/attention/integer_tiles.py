"""Tiles of a cache of integers as float16, and what their words say; `integer_codes.py` has the layout.

Codes become numbers in registers, four an instruction group, and nothing else is done to them: a key's scale multiplies
its scores, a value's scale the weights that it gets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.attention.tiles import INTERPRETED, multiply, row_offsets

# Weights times a value's scale are float16: as they are, small scales would leave them few digits.
VALUE_FACTOR = tl.constexpr(256.0)

# Four bytes to four float16: a byte beside 0x64 is 1024 + byte, exactly.
_BYTES = tl.constexpr("""{
.reg .b32 biased, middle;
mov.b32 middle, 0x64806480;
xor.b32 biased, $2, 0x80808080;
prmt.b32 $0, biased, 0x64646464, 0x4140;
prmt.b32 $1, biased, 0x64646464, 0x4342;
sub.f16x2 $0, $0, middle;
sub.f16x2 $1, $1, middle;
}""")
_LOW = tl.constexpr("""{
.reg .b32 left, right, middle;
mov.b32 middle, 0x64086408;
prmt.b32 left, $2, 0, 0x4140;
prmt.b32 right, $2, 0, 0x4342;
lop3.b32 left, left, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 right, right, 0x000F000F, 0x64006400, 0xEA;
sub.f16x2 $0, left, middle;
sub.f16x2 $1, right, middle;
}""")
# Bits 4 to 7 of a float16 with the exponent of 64 count ones.
_HIGH = tl.constexpr("""{
.reg .b32 left, right, middle;
mov.b32 middle, 0x54805480;
prmt.b32 left, $2, 0, 0x4140;
prmt.b32 right, $2, 0, 0x4342;
lop3.b32 left, left, 0x00F000F0, 0x54005400, 0xEA;
lop3.b32 right, right, 0x00F000F0, 0x54005400, 0xEA;
sub.f16x2 $0, left, middle;
sub.f16x2 $1, right, middle;
}""")


@triton.jit
def load_words(
    words,
    pages,
    start,
    head,
    inside,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Words [BLOCK_N] of the tokens of the tile at `start`; 0, a scale of nothing, where `inside` is false."""
    offsets = row_offsets(pages, start, head, KV_HEADS, PAGE, 1, HEAD_WORDS, BLOCK_N, WIDE)
    return tl.load(words + offsets, mask=inside, other=0)


@triton.jit
def part_of_word(word, PART: tl.constexpr):
    """One of the four float16 in int64 words, as float32: scale and middle of the first half, then of the second."""
    return (word >> (16 * PART)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def bytes_to_half(codes):
    """int8 as float16."""
    if INTERPRETED:
        return codes.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(_BYTES, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def low_to_half(codes):
    """The low four bits of uint8, less 8, as float16."""
    if INTERPRETED:
        return (codes & 15).to(tl.float16) - 8.0
    else:
        return tl.inline_asm_elementwise(_LOW, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def high_to_half(codes):
    """The high four bits of uint8, less 8, as float16."""
    if INTERPRETED:
        return (codes >> 4).to(tl.float16) - 8.0
    else:
        return tl.inline_asm_elementwise(_HIGH, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def join_halves(low, high, ROWS: tl.constexpr, PADDED_DIM: tl.constexpr):
    """[ROWS, PADDED_DIM / 2] of both halves of a head as [ROWS, PADDED_DIM]."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (ROWS, PADDED_DIM))


@triton.jit
def channels(HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BITS: tl.constexpr):
    """Which element of a head each of PADDED_DIM columns is, and whether it is one; with 4 bits, each half is
    padded."""
    column = tl.arange(0, PADDED_DIM)
    if BITS == 4:
        half: tl.constexpr = PADDED_DIM // 2
        inside = column % half < HEAD_DIM // 2
        return column % half + column // half * (HEAD_DIM // 2), inside
    else:
        return column, column < HEAD_DIM


@triton.jit
def load_half(rows, mine, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] of queries from their addresses; 0 where `mine` is false and past WIDTH."""
    column = tl.arange(0, PADDED)
    return tl.load(rows[:, None] + column[None, :], mask=mine[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def nibble_scores(lower, upper, lower_sum, upper_sum, keys, words):
    """Scores [rows, keys] of queries in two halves, whose sums are given, for keys of 4 bits."""
    scores = multiply(lower, tl.trans(low_to_half(keys))) * part_of_word(words, 0)[None, :]
    scores += multiply(upper, tl.trans(high_to_half(keys))) * part_of_word(words, 2)[None, :]
    scores += lower_sum[:, None] * part_of_word(words, 1)[None, :]
    return scores + upper_sum[:, None] * part_of_word(words, 3)[None, :]


@triton.jit
def scaled(weight, scale):
    """Weights [rows, tokens] as their values' codes take them, in float16."""
    return (weight * (scale * VALUE_FACTOR)[None, :]).to(tl.float16)
