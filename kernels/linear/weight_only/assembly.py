"""PTX that turns packed codes into 16-bit floats, two at a time.

A float whose exponent puts its last mantissa bits at weights 1, 2, 4 ... holds a small integer in those bits: bfloat16
0x4300 is 128 and 0x4300 | code is 128 + code, exactly; for float16 it is 0x6400 and 1024. So codes become floats by one
three-input logic instruction for two of them, and subtracting 128 + zero leaves code - zero without any rounding. Eight
bits are more than bfloat16's mantissa has; there the code is (128 + its low seven bits) - (128, or 256 if negative).

Every text below works on two neighbouring lanes at once (`pack=2`) and gives eight registers, one a slab, each with the
two lanes' values. Nothing depends on which two lanes the compiler puts together.

Tables (NF4, FP4) have no such formula. Byte permutes look four codes up at once, in registers: the loop of `skinny.py`
has 5.2 instructions a weight so, 3.1 of them for the integer unit. A table of pairs in shared memory (`pair_table`) has
an entry for each of the 256 pairs of codes, the two values in one register: 3.2 instructions a weight, 1.0 of them
integer. With 32 copies of the table each lane of a warp has its own memory bank.
"""

from __future__ import annotations

import re
import struct
from functools import cache

import torch
import triton.language as tl

TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
PTX = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_AND_OR = "0xEA"  # lop3: (a & b) | c
MAGIC = {"bf16": 0x4300, "fp16": 0x6400}
_X2 = {"bf16": "bf16x2", "fp16": "f16x2"}
_FUSED = (".reg .b32 minus;", "mov.b32 minus, 0xBF80BF80;")  # -1, twice


@cache
def assembly(
    kind: str, dtype: str, table: tuple[float, ...] = (), zeros: int = 0, copies: int = 0, fused: bool = False
) -> tuple[str, str]:
    """(text, constraints) for codes of a kind and values in `bf16` or `fp16`. `fused` is for cards that have no
    difference of bfloat16 alone.

    `copies` of a table of pairs stand in shared memory, where `pair_table` has put them; 0: byte permutes.

    Operands behind the eight results: the words, then the high parts (int3, int8), then `zeros` numbers whose low byte
    is the zero point of so many equal parts of the chunk. Without any, it is the middle code.
    """
    if kind in _TABLES:
        body, operands = _pairs(copies) if copies else _codebook(dtype, table)
    else:
        body, operands = _INTEGERS[kind](dtype)
        for part in range(max(1, zeros)):
            one, other = f"${8 + operands + 2 * part}", f"${9 + operands + 2 * part}"
            body = body + (_zero_point(one, other, kind, dtype) if zeros else _middle(kind, dtype))
            share = 8 // max(1, zeros)
            body += [_less(f"${slab}", f"${slab}", "z", dtype) for slab in range(part * share, (part + 1) * share)]
        operands += 2 * zeros
    lines = [*_FUSED, *map(_fused, body)] if fused else body
    text = "{\n.reg .b32 a, b, t, u, v, p, q, r, s, z;\n" + "\n".join(lines) + "\n}\n"
    return text, ",".join(["=&r"] * 8 + ["r"] * operands)


def _less(target: str, one: str, other: str, dtype: str) -> str:
    return f"sub.{_X2[dtype]} {target}, {one}, {other};"


def _fused(line: str) -> str:
    """A difference of bfloat16 as other * -1 + one, which is rounded once, and so the same. H200: 1 to 4 % slower."""
    found = re.fullmatch(r"sub\.bf16x2 (\S+), (\S+), (\S+);", line)
    return line if found is None else f"fma.rn.bf16x2 {found[1]}, {found[3]}, minus, {found[2]};"


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
        _less(target, "t", "u", "bf16"),
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
    lines = _mixed()
    for parity, codes in enumerate(("a", "b")):
        lines += [
            f"and.b32 p, {codes}, 0x77777777;",
            f"shr.u32 t, {codes}, 1;",
            f"lop3.b32 s, t, 0x44444444, 0x32103210, {_AND_OR};",
        ]
        for half in range(2):
            if half:
                lines += ["shr.u32 p, p, 16;", "shr.u32 s, s, 16;"]
            lines += [*_permuted("u", low, "p", "s"), *_permuted("v", high, "p", "s")]
            slab = 4 * half + parity
            lines += [f"prmt.b32 ${slab}, u, v, 0x5140;", f"prmt.b32 ${slab + 2}, u, v, 0x7362;"]
    return lines, 2


def _mixed() -> list[str]:
    """Words of two lanes -> words whose bytes hold both lanes' codes of a slab, the first lane's below."""
    select = "0xE2"  # lop3: (a & b) | (c & ~b)
    return [
        "shl.b32 t, $9, 4;",
        f"lop3.b32 a, $8, 0x0F0F0F0F, t, {select};",  # slabs 0, 2, 4, 6
        "shr.u32 t, $8, 4;",
        f"lop3.b32 b, t, 0x0F0F0F0F, $9, {select};",  # slabs 1, 3, 5, 7
    ]


def _pairs(copies: int) -> tuple[list[str], int]:
    """Each byte of two mixed words is an entry of the table of pairs; products run beside the integer unit."""
    lines = [*_own_copy("p", copies), *_mixed()]
    for parity, codes in enumerate(("a", "b")):
        for byte in range(4):
            lines += [
                f"prmt.b32 t, {codes}, 0, 0x444{byte};",
                f"mad.lo.u32 t, t, {4 * copies}, p;",
                f"ld.shared.b32 ${2 * byte + parity}, [t];",
            ]
    return lines, 2


def _own_copy(target: str, copies: int) -> list[str]:
    """Where entry 0 of this lane's copy stands."""
    return ["mov.u32 t, %tid.x;", f"and.b32 t, t, {copies - 1};", "mov.u32 u, pairs;", f"mad.lo.u32 {target}, t, 4, u;"]


@cache
def pair_table(dtype: str, table: tuple[float, ...], copies: int, threads: int) -> str:
    """Text that puts `copies` (4 to 32) of the table of pairs into shared memory, to be run once, by all threads.

    Entry `first | second << 4` stands `copies` times in a row: the first code's value in the low half, the second's in
    the high half. The name of the table is the function's, for `assembly` to use: a second run is an error of the
    assembler. Threads begin at different places of their entries, which would otherwise lie in the same banks.
    """
    low, high = _byte_tables(table, dtype)
    some = "@p " if threads > 256 else ""
    lines = ["mov.u32 i, %tid.x;", "mov.u32 b, pairs;"] + (["setp.lt.u32 p, i, 256;"] if some else [])
    for first in range(0, 256, threads):
        lines += [
            f"add.u32 e, i, {first};",
            "and.b32 s, e, 0x77;",
            "shr.u32 t, e, 1;",
            f"lop3.b32 t, t, 0x44, 0x3210, {_AND_OR};",
            *_permuted("u", low, "s", "t"),
            *_permuted("v", high, "s", "t"),
            "prmt.b32 u, u, v, 0x5140;",
            f"mad.lo.u32 e, e, {4 * copies}, b;",
        ]
        for part in range(copies // 4):
            lines += [
                f"add.u32 t, i, {part};",
                f"and.b32 t, t, {copies // 4 - 1};",
                "mad.lo.u32 t, t, 16, e;",
                f"{some}st.shared.v4.b32 [t], {{u, u, u, u}};",
            ]
    registers = ".reg .b32 b, e, i, q, r, s, t, u, v;\n.reg .pred p;\n"
    body = "\n".join([*lines, "bar.sync 0;", "mov.b32 $0, 0;"])
    return f".shared .align 128 .b8 pairs[{1024 * copies}];\n{{\n{registers}{body}\n}}\n"


def _permuted(target: str, entries: list[str], codes: str, halves: str) -> list[str]:
    """One byte of the values of up to four codes. A prmt sees eight entries; the third picks between two of them."""
    return [
        f"prmt.b32 r, {entries[0]}, {entries[1]}, {codes};",
        f"prmt.b32 q, {entries[2]}, {entries[3]}, {codes};",
        f"prmt.b32 {target}, r, q, {halves};",
    ]


def _byte_tables(table: tuple[float, ...], dtype: str) -> tuple[list[str], list[str]]:
    values = torch.tensor(table, dtype=torch.bfloat16 if dtype == "bf16" else torch.float16)
    patterns = [pattern & 0xFFFF for pattern in values.view(torch.int16).tolist()]
    return _registers([pattern & 0xFF for pattern in patterns]), _registers([pattern >> 8 for pattern in patterns])


def _registers(entries: list[int]) -> list[str]:
    return [f"0x{struct.unpack('<I', bytes(entries[i : i + 4]))[0]:08X}" for i in range(0, 16, 4)]


_INTEGERS = {"int2": _int2, "int3": _int3, "int4": _int4, "int8": _int8}
_TABLES = ("nf4", "fp4", "e2m1")
