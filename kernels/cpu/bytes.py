"""Operations on vectors of bytes for which processors have instructions that LLVM does not find by itself."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.kernels.cpu.language import F32, I8, I16, I32, Code, Value
from quantkit.kernels.cpu.processor import Processor


def dot(code: Code, sums: Value, codes: Value, x: Value, *, bits: int) -> Value:
    """sums [lanes] + the products of four bytes for each: codes of so many bits, signed or not as the processor has
    it, with signed x."""
    processor, lanes = code.processor, sums.type.lanes
    if processor.dot == "wide" or (processor.dot == "pmaddubsw" and bits == 8):
        return sums + _fours(codes.to(I32, signed=processor.multiplies_signed) * x.to(I32))
    size = min(4 * lanes, 16 if processor.dot == "sdot" else processor.vector)  # bytes at once
    parts = []
    for start in range(0, 4 * lanes, size):
        sum, left, right = sums.cut(start // 4, size // 4), codes.cut(start, size), x.cut(start, size)
        parts.append(_DOTS[processor.dot](code, sum, left, right))
    return code.join(parts)


def _sdot(code: Code, sums: Value, codes: Value, x: Value) -> Value:
    return code.call("llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, sums, codes, x)


def _vpdpbusd(code: Code, sums: Value, codes: Value, x: Value) -> Value:
    return code.call(f"llvm.x86.avx512.vpdpbusd.{8 * codes.type.lanes}", sums.type, sums, codes, x)


def _pmaddubsw(code: Code, sums: Value, codes: Value, x: Value) -> Value:
    """Two products are at most 2 * 127 * 127 here: 16 bits hold them."""
    lanes = codes.type.lanes
    multiply, add = _PAIRS[lanes]
    pairs = code.call(multiply, I16.x(lanes // 2), codes, x)
    return sums + code.call(add, sums.type, pairs, code.constant(pairs.type, 1))


_PAIRS = {  # of bytes, then of the 16 bits that these give
    32: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    64: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
}


_DOTS = {"sdot": _sdot, "vpdpbusd": _vpdpbusd, "pmaddubsw": _pmaddubsw}


def _fours(values: Value) -> Value:
    """Sums of four lanes that stand together."""
    lanes = values.type.lanes
    pairs = values.pick(range(0, lanes, 2)) + values.pick(range(1, lanes, 2))
    return pairs.pick(range(0, lanes // 2, 2)) + pairs.pick(range(1, lanes // 2, 2))


def signed_byte(code: Code, quads: Value, place: Value) -> Value:
    """One of the four bytes of each 32 bits, by a place from 0 to 3: codes of 8 bits, signed or larger by 128 as the
    processor multiplies them."""
    byte = (quads >> (place * 8).to(I32).splat(quads.type.lanes)) & 255
    return (byte ^ 128) - 128 if code.processor.multiplies_signed else byte - 128


def look_up(code: Code, table: Sequence[int], places: Value) -> Value:
    """Bytes of a table of 16, by places from 0 to 15."""
    if code.processor.is_arm:
        name, size = "llvm.aarch64.neon.tbl1.v16i8", 16
    elif code.processor.vector == 64:
        name, size = "llvm.x86.avx512.pshuf.b.512", 64
    elif code.processor.vector == 32:
        name, size = "llvm.x86.avx2.pshuf.b", 32
    else:
        return _select(code, table, places)
    values = code.constant(I8.x(size), [byte & 255 for byte in table] * (size // 16))
    parts = [places.cut(start, size) for start in range(0, places.type.lanes, size)]
    return code.join([code.call(name, values.type, values, part) for part in parts])


def looks_up_floats(processor: Processor) -> bool:
    """Whether an instruction finds one of 16 floats in each lane."""
    return processor.vector == 64


def look_up_float(code: Code, table: Sequence[float], places: Value) -> Value:
    """Floats of a table of 16, by the lowest four bits of 16 lanes; where the processor `looks_up_floats`."""
    values = code.constant(F32.x(16), list(table))
    return code.call("llvm.x86.avx512.permvar.sf.512", values.type, values, places)


def _select(code: Code, table: Sequence[int], places: Value) -> Value:
    """One entry after the other, where no instruction looks bytes up."""
    found = code.constant(places.type, table[0] & 255)
    for place, byte in list(enumerate(table))[1:]:
        later = code.constant(places.type, place - 1) < places
        found = code.select(later, code.constant(places.type, byte & 255), found)
    return found
