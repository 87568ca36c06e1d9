"""Tiles of a cache of integers as products take them where tokens are rows; `integer_codes.py` has the layout.

Keys stay integers. Values are read four bytes at a time, and what a product takes is one byte of every word in all
tokens [words, tokens]: two instructions give it for two tokens. Its float16 are too large by an OFFSET, which is taken
away after the last tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.attention.tiles import INTERPRETED

BYTE_OFFSET = tl.constexpr(1152.0)  # 0x6480: what has a byte for its last bits is 1024 + byte, and 128 is its sign
LOW_OFFSET = tl.constexpr(1032.0)  # 0x6400, and codes of four bits are less 8
HIGH_OFFSET = tl.constexpr(72.0)  # 0x5400: bits 4 to 7 of a float16 with the exponent of 64 count ones

_HALVES = tl.constexpr((tl.float16,) * 4)
_EIGHT_HALVES = tl.constexpr((tl.float16,) * 8)
# Two words, of two tokens: the same byte of both side by side, then the exponent. lop3 0x6A is (a & b) ^ c.
_BYTES = tl.constexpr("""{
.reg .b32 pair;
prmt.b32 pair, $4, $5, 0x4400;
lop3.b32 $0, pair, 0x00FF00FF, 0x64806480, 0x6A;
prmt.b32 pair, $4, $5, 0x5511;
lop3.b32 $1, pair, 0x00FF00FF, 0x64806480, 0x6A;
prmt.b32 pair, $4, $5, 0x6622;
lop3.b32 $2, pair, 0x00FF00FF, 0x64806480, 0x6A;
prmt.b32 pair, $4, $5, 0x7733;
lop3.b32 $3, pair, 0x00FF00FF, 0x64806480, 0x6A;
}""")
_NIBBLES = tl.constexpr("""{
.reg .b32 pair;
prmt.b32 pair, $8, $9, 0x4400;
lop3.b32 $0, pair, 0x000F000F, 0x64006400, 0x6A;
lop3.b32 $4, pair, 0x00F000F0, 0x54005400, 0x6A;
prmt.b32 pair, $8, $9, 0x5511;
lop3.b32 $1, pair, 0x000F000F, 0x64006400, 0x6A;
lop3.b32 $5, pair, 0x00F000F0, 0x54005400, 0x6A;
prmt.b32 pair, $8, $9, 0x6622;
lop3.b32 $2, pair, 0x000F000F, 0x64006400, 0x6A;
lop3.b32 $6, pair, 0x00F000F0, 0x54005400, 0x6A;
prmt.b32 pair, $8, $9, 0x7733;
lop3.b32 $3, pair, 0x000F000F, 0x64006400, 0x6A;
lop3.b32 $7, pair, 0x00F000F0, 0x54005400, 0x6A;
}""")
_HIGH_NIBBLES = tl.constexpr("""{
.reg .b32 moved;
shr.b32 moved, $1, 4;
and.b32 $0, moved, 0x0F0F0F0F;
}""")


@triton.jit
def byte_operands(words):
    """The four bytes of int32 words as float16: code + BYTE_OFFSET."""
    if INTERPRETED:
        return _byte(words, 0), _byte(words, 1), _byte(words, 2), _byte(words, 3)
    else:
        return tl.inline_asm_elementwise(_BYTES, "=r,=r,=r,=r,r,r", [words], dtype=_HALVES, is_pure=True, pack=2)


@triton.jit
def _byte(words, NUMBER: tl.constexpr):
    return (words >> (8 * NUMBER)).to(tl.int8).to(tl.float16) + BYTE_OFFSET


@triton.jit
def nibble_operands(words):
    """The low halves of the four bytes of int32 words as float16, code + LOW_OFFSET, then the high ones, code +
    HIGH_OFFSET."""
    if INTERPRETED:
        low = _low(words, 0), _low(words, 1), _low(words, 2), _low(words, 3)
        return low + (_high(words, 0), _high(words, 1), _high(words, 2), _high(words, 3))
    else:
        return tl.inline_asm_elementwise(
            _NIBBLES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], dtype=_EIGHT_HALVES, is_pure=True, pack=2
        )


@triton.jit
def _low(words, NUMBER: tl.constexpr):
    return ((words >> (8 * NUMBER)) & 15).to(tl.float16) + (LOW_OFFSET - 8.0)


@triton.jit
def _high(words, NUMBER: tl.constexpr):
    return ((words >> (8 * NUMBER + 4)) & 15).to(tl.float16) + (HIGH_OFFSET - 8.0)


@triton.jit
def low_nibbles(codes):
    """The low four bits of uint8 as int8, 0 to 15."""
    if INTERPRETED:
        return (codes & 15).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4
        )


@triton.jit
def high_nibbles(codes):
    """The high four bits of uint8 as int8, 0 to 15."""
    if INTERPRETED:
        return (codes >> 4).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(_HIGH_NIBBLES, "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def columns_of_words(first, second, third, fourth, WORDS: tl.constexpr, COLUMNS: tl.constexpr):
    """[COLUMNS, 4 * WORDS] in the order of bytes, from the sums [WORDS, COLUMNS] of every byte of a word."""
    even = tl.join(first, third)  # [WORDS, COLUMNS, 2]
    odd = tl.join(second, fourth)
    bytes_ = tl.join(even, odd)  # [.., byte / 2, byte % 2]
    return tl.reshape(tl.permute(bytes_, (1, 0, 2, 3)), (COLUMNS, 4 * WORDS))
