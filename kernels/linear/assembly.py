"""PTX that turns packed codes into 16-bit floats, two at a time.

A float whose exponent puts its last mantissa bits at weights 1, 2, 4 ... holds a small integer in those bits: bfloat16
0x4300 is 128 and 0x4300 | code is 128 + code, exactly; for float16 it is 0x6400 and 1024. So codes become floats by one
three-input logic instruction for two of them, and subtracting 128 + zero leaves code - zero without any rounding. Eight
bits are more than bfloat16's mantissa has; there the code is (128 + its low seven bits) - (128, or 256 if negative).

Every text below works on two neighbouring lanes at once (`pack=2`) and gives eight registers, one a slab, each with the
two lanes' values. Nothing depends on which two lanes the compiler puts together.
"""

from __future__ import annotations

import struct
from functools import cache

import torch
import triton.language as tl

TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
PTX = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_AND_OR = "0xEA"  # lop3: (a & b) | c
MAGIC = {"bf16": 0x4300, "fp16": 0x6400}
_X2 = {"bf16": "bf16x2", "fp16": "f16x2"}


@cache
def assembly(kind: str, dtype: str, table: tuple[float, ...] = (), zeros: int = 0) -> tuple[str, str]:
    """(text, constraints) for codes of a kind and values in `bf16` or `fp16`.

    Operands behind the eight results: the words, then the high parts (int3, int8), then `zeros` numbers whose low byte
    is the zero point of so many equal parts of the chunk. Without any, it is the middle code.
    """
    if kind in _TABLES:
        body, operands = _codebook(dtype, table)
    else:
        body, operands = _INTEGERS[kind](dtype)
        for part in range(max(1, zeros)):
            one, other = f"${8 + operands + 2 * part}", f"${9 + operands + 2 * part}"
            body = body + (_zero_point(one, other, kind, dtype) if zeros else _middle(kind, dtype))
            share = 8 // max(1, zeros)
            body += [f"sub.{_X2[dtype]} ${slab}, ${slab}, z;" for slab in range(part * share, (part + 1) * share)]
        operands += 2 * zeros
    text = "{\n.reg .b32 a, b, t, u, v, p, q, r, s, z;\n" + "\n".join(body) + "\n}\n"
    return text, ",".join(["=&r"] * 8 + ["r"] * operands)


def _middle(kind: str, dtype: str) -> list[str]:
    """The middle code as what was added to every code says it, twice."""
    signed = kind == "int8" and dtype == "bf16"  # whose codes are centred already
    return [f"mov.b32 z, {_twice(0 if signed else MAGIC[dtype] | 1 << (int(kind[3:]) - 1))};"]


def _zero_point(one: str, other: str, kind: str, dtype: str) -> list[str]:
    """The low bytes of two registers, as what was added to every code says them."""
    lines = [f"prmt.b32 z, {one}, {other}, 0x5410;"]
    if kind == "int8" and dtype == "bf16":
        lines += ["xor.b32 z, z, 0x00800080;", *_signed("z", "z")]
    else:
        lines += [f"lop3.b32 z, z, {_twice(0xFF)}, {_twice(MAGIC[dtype])}, {_AND_OR};"]
    return lines


def _signed(target: str, source: str) -> list[str]:
    """Two signed bytes, each in the low half of a half register, as bfloat16."""
    return [
        f"lop3.b32 t, {source}, {_twice(0x7F)}, {_twice(MAGIC['bf16'])}, {_AND_OR};",
        f"lop3.b32 u, {source}, {_twice(0x80)}, {_twice(MAGIC['bf16'])}, {_AND_OR};",
        f"sub.bf16x2 {target}, t, u;",
    ]


def _field(target: str, source: str, shift: int, mask: int, magic: int) -> list[str]:
    lines = [] if shift == 0 else [f"shr.u32 t, {source}, {shift};"]
    moved = source if shift == 0 else "t"
    return [*lines, f"lop3.b32 {target}, {moved}, {_twice(mask)}, {_twice(magic)}, {_AND_OR};"]


def _twice(half: int) -> str:
    return f"0x{half:04X}{half:04X}"


def _int4(dtype: str) -> tuple[list[str], int]:
    lines = ["prmt.b32 a, $8, $9, 0x5410;", "prmt.b32 b, $8, $9, 0x7632;"]
    for slab in range(8):
        lines += _field(f"${slab}", "ab"[slab // 4], 4 * (slab % 4), 0xF, MAGIC[dtype])
    return lines, 2


def _int2(dtype: str) -> tuple[list[str], int]:
    lines = []
    for slab in range(8):
        lines += _field(f"${slab}", "$8", 2 * slab, 0x3, MAGIC[dtype])
    return lines, 1


def _int3(dtype: str) -> tuple[list[str], int]:
    """The high part comes as 16-bit numbers, two in a register."""
    lines = []
    for slab in range(8):
        lines += _field(f"${slab}", "$8", 2 * slab, 0x3, MAGIC[dtype])
        move = f"shr.u32 t, $9, {slab - 2};" if slab >= 2 else f"shl.b32 t, $9, {2 - slab};"
        lines += [move, f"lop3.b32 ${slab}, t, {_twice(0x4)}, ${slab}, {_AND_OR};"]
    return lines, 2


def _int8(dtype: str) -> tuple[list[str], int]:
    """Signed bytes; float16 takes them unsigned."""
    lines = []
    for slab in range(8):
        low, high = ("$8", "$9") if slab < 4 else ("$10", "$11")
        byte = slab % 4
        lines.append(f"prmt.b32 a, {low}, {high}, 0x{4 + byte}{4 + byte}{byte}{byte};")
        if dtype == "bf16":
            lines += _signed(f"${slab}", "a")
        else:
            lines += [
                "xor.b32 a, a, 0x00800080;",
                f"lop3.b32 ${slab}, a, {_twice(0xFF)}, {_twice(MAGIC[dtype])}, {_AND_OR};",
            ]
    return lines, 4


def _codebook(dtype: str, table: tuple[float, ...]) -> tuple[list[str], int]:
    """A table of 16 values is four registers of their low bytes and four of their high bytes; prmt looks up four codes.

    The four codes of one lookup alternate between the two lanes, so that a last prmt of low and high bytes gives both
    lanes' values of a slab. One prmt sees eight entries: two lookups, then a third takes each byte from the half that
    bit 3 names.
    """
    low, high = _byte_tables(table, dtype)
    select = "0xE2"  # lop3: (a & b) | (c & ~b)
    lines = [
        "shl.b32 t, $9, 4;",
        f"lop3.b32 a, $8, 0x0F0F0F0F, t, {select};",  # codes of slabs 0, 2, 4, 6, lanes alternating
        "shr.u32 t, $8, 4;",
        f"lop3.b32 b, t, 0x0F0F0F0F, $9, {select};",  # slabs 1, 3, 5, 7
    ]
    for parity, codes in enumerate(("a", "b")):
        lines += [
            f"and.b32 p, {codes}, 0x77777777;",
            f"shr.u32 t, {codes}, 1;",
            f"lop3.b32 q, t, 0x44444444, 0x32103210, {_AND_OR};",
        ]
        for half in range(2):
            if half:
                lines += ["shr.u32 p, p, 16;", "shr.u32 q, q, 16;"]
            for target, entries in (("u", low), ("v", high)):
                lines += [
                    f"prmt.b32 r, {entries[0]}, {entries[1]}, p;",
                    f"prmt.b32 s, {entries[2]}, {entries[3]}, p;",
                    f"prmt.b32 {target}, r, s, q;",
                ]
            slab = 4 * half + parity
            lines += [f"prmt.b32 ${slab}, u, v, 0x5140;", f"prmt.b32 ${slab + 2}, u, v, 0x7362;"]
    return lines, 2


def _byte_tables(table: tuple[float, ...], dtype: str) -> tuple[list[str], list[str]]:
    values = torch.tensor(table, dtype=torch.bfloat16 if dtype == "bf16" else torch.float16)
    patterns = [pattern & 0xFFFF for pattern in values.view(torch.int16).tolist()]
    return _registers([pattern & 0xFF for pattern in patterns]), _registers([pattern >> 8 for pattern in patterns])


def _registers(entries: list[int]) -> list[str]:
    return [f"0x{struct.unpack('<I', bytes(entries[i : i + 4]))[0]:08X}" for i in range(0, 16, 4)]


_INTEGERS = {"int2": _int2, "int3": _int3, "int4": _int4, "int8": _int8}
_TABLES = ("nf4", "fp4")
