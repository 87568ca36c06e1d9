"""Tiles of a cache of integers as products take them where tokens are rows; `integer_codes.py` has the layout.

Keys stay integers. Values are read four bytes at a time, and what a product takes is one byte of every word in all
tokens [words, tokens]: three instructions give it for two tokens. Two of them make a float16 that is too large by a
known number (1024 + byte has the byte for its last bits), the third takes that away. It cannot wait until sums are
ready, although one number would do then: matrix units drop what sums have no room for, and those of thousands of tokens
would have lost the codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.attention.tiles import INTERPRETED

_HALVES = tl.constexpr((tl.float16,) * 4)
_EIGHT_HALVES = tl.constexpr((tl.float16,) * 8)
# Two words, of two tokens: the same byte of both side by side, then the exponent, then less what is too much. lop3 0x6A
# is (a & b) ^ c. 0x64806480: of 1024, and the sign turned, so that it is 1152 + code; 0xE480E480: -1152 twice.
_BYTES = tl.constexpr("""{
.reg .b32 pair, less;
mov.b32 less, 0xE480E480;
prmt.b32 pair, $4, $5, 0x4400;
lop3.b32 pair, pair, 0x00FF00FF, 0x64806480, 0x6A;
add.f16x2 $0, pair, less;
prmt.b32 pair, $4, $5, 0x5511;
lop3.b32 pair, pair, 0x00FF00FF, 0x64806480, 0x6A;
add.f16x2 $1, pair, less;
prmt.b32 pair, $4, $5, 0x6622;
lop3.b32 pair, pair, 0x00FF00FF, 0x64806480, 0x6A;
add.f16x2 $2, pair, less;
prmt.b32 pair, $4, $5, 0x7733;
lop3.b32 pair, pair, 0x00FF00FF, 0x64806480, 0x6A;
add.f16x2 $3, pair, less;
}""")
# 0x64006400: of 1024, so that it is 1032 + code, and -1032 twice; 0x54005400: of 64, whose bits 4 to 7 count ones, so
# that it is 72 + code, and -72 twice.
_NIBBLES = tl.constexpr("""{
.reg .b32 pair, half, less, less_high;
mov.b32 less, 0xE408E408;
mov.b32 less_high, 0xD480D480;
prmt.b32 pair, $8, $9, 0x4400;
lop3.b32 half, pair, 0x000F000F, 0x64006400, 0x6A;
add.f16x2 $0, half, less;
lop3.b32 half, pair, 0x00F000F0, 0x54005400, 0x6A;
add.f16x2 $4, half, less_high;
prmt.b32 pair, $8, $9, 0x5511;
lop3.b32 half, pair, 0x000F000F, 0x64006400, 0x6A;
add.f16x2 $1, half, less;
lop3.b32 half, pair, 0x00F000F0, 0x54005400, 0x6A;
add.f16x2 $5, half, less_high;
prmt.b32 pair, $8, $9, 0x6622;
lop3.b32 half, pair, 0x000F000F, 0x64006400, 0x6A;
add.f16x2 $2, half, less;
lop3.b32 half, pair, 0x00F000F0, 0x54005400, 0x6A;
add.f16x2 $6, half, less_high;
prmt.b32 pair, $8, $9, 0x7733;
lop3.b32 half, pair, 0x000F000F, 0x64006400, 0x6A;
add.f16x2 $3, half, less;
lop3.b32 half, pair, 0x00F000F0, 0x54005400, 0x6A;
add.f16x2 $7, half, less_high;
}""")
_HIGH_NIBBLES = tl.constexpr("""{
.reg .b32 moved;
shr.b32 moved, $1, 4;
and.b32 $0, moved, 0x0F0F0F0F;
}""")


@triton.jit
def byte_operands(words):
    """The four bytes of int32 words as float16."""
    if INTERPRETED:
        return _byte(words, 0), _byte(words, 1), _byte(words, 2), _byte(words, 3)
    else:
        return tl.inline_asm_elementwise(_BYTES, "=r,=r,=r,=r,r,r", [words], dtype=_HALVES, is_pure=True, pack=2)


@triton.jit
def _byte(words, NUMBER: tl.constexpr):
    return (words >> (8 * NUMBER)).to(tl.int8).to(tl.float16)


@triton.jit
def nibble_operands(words):
    """The low halves of the four bytes of int32 words as float16, less 8, then the high ones."""
    if INTERPRETED:
        low = _nibble(words, 0), _nibble(words, 8), _nibble(words, 16), _nibble(words, 24)
        return low + (_nibble(words, 4), _nibble(words, 12), _nibble(words, 20), _nibble(words, 28))
    else:
        return tl.inline_asm_elementwise(
            _NIBBLES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], dtype=_EIGHT_HALVES, is_pure=True, pack=2
        )


@triton.jit
def _nibble(words, FIRST: tl.constexpr):
    return ((words >> FIRST) & 15).to(tl.float16) - 8.0


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
