"""The PTX that decodes weights, run instruction by instruction: without a GPU nothing else sees it."""

import re
import struct

import pytest
import torch

from quantkit.formats.codebook import table_of
from quantkit.kernels.linear.assembly import assembly
from quantkit.kernels.linear.packed import _lanes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WORD = 0xFFFFFFFF


class Machine:
    """Registers of 32 bits and the instructions that `assembly` writes."""

    def __init__(self, inputs: list[int]) -> None:
        self.registers = {f"${8 + index}": value & WORD for index, value in enumerate(inputs)}

    def run(self, text: str) -> list[int]:
        for line in re.findall(r"^\s*([a-z][\w.]+ [^;]*);", text, re.MULTILINE):
            if line.startswith(".reg"):
                continue
            name, _, rest = line.partition(" ")
            target, *sources = [part.strip() for part in rest.split(",")]
            values = [self.registers[source] if source in self.registers else int(source, 0) for source in sources]
            self.registers[target] = self.compute(name, values) & WORD
        return [self.registers[f"${slab}"] for slab in range(8)]

    def compute(self, name: str, values: list[int]) -> int:
        operation, _, kind = name.partition(".")
        if operation in ("sub", "mul"):
            return _pairwise(operation, kind, *values)
        return {
            "prmt": _permute,
            "lop3": _logic,
            "shr": lambda value, count: value >> count,
            "shl": lambda value, count: value << count,
            "and": lambda one, other: one & other,
            "xor": lambda one, other: one ^ other,
            "mov": lambda value: value,
        }[operation](*values)


def _permute(low: int, high: int, selector: int) -> int:
    """Four nibbles pick four of eight bytes; their top bit would ask for the byte's sign instead."""
    pool = struct.pack("<II", low, high)
    picks = [(selector >> (4 * place)) & 15 for place in range(4)]
    assert all(pick < 8 for pick in picks)
    return int.from_bytes(bytes(pool[pick] for pick in picks), "little")


def _logic(a: int, b: int, c: int, table: int) -> int:
    result = 0
    for place in range(32):
        index = ((a >> place) & 1) << 2 | ((b >> place) & 1) << 1 | ((c >> place) & 1)
        result |= ((table >> index) & 1) << place
    return result


def _pairwise(operation: str, kind: str, one: int, other: int) -> int:
    dtype = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}[kind]
    left, right = _halves(one, dtype), _halves(other, dtype)
    result = (left - right if operation == "sub" else left * right).to(dtype)
    low, high = (int(bits) & 0xFFFF for bits in result.view(torch.int16))
    return high << 16 | low


def _halves(register: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.int16).view(dtype)


def registers_of(kind: str, codes: torch.Tensor) -> list[int]:
    """The inputs of the assembly for two lanes, codes [2, 8]: words, then high parts, 16-bit ones two in a register."""
    bits = int(kind[3:]) if kind.startswith("int") else 4
    stored = codes ^ 128 if bits == 8 else codes
    row = torch.zeros(1, 128, dtype=torch.uint8)
    for slab in range(8):
        row[0, 16 * slab : 16 * slab + 2] = stored[:, slab]
    words, high = _lanes(row, bits)
    parts = []
    for plane in (words, high):
        if plane is None:
            continue
        lanes = [int(value) for value in plane[0, 0, :2]]
        narrow = plane.dtype != torch.int32
        parts += [(lanes[0] & 0xFFFF) | (lanes[1] & 0xFFFF) << 16] if narrow else lanes
    return parts


@pytest.mark.parametrize("zeros", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int2", "int3", "int4", "int8"])
def test_integers(kind: str, dtype: str, zeros: int) -> None:
    bits = int(kind[3:])
    generator = torch.Generator().manual_seed(bits)
    for _ in range(20):
        codes = torch.randint(0, 1 << bits, (2, 8), generator=generator).to(torch.uint8)
        points = torch.randint(0, 1 << bits, (2, max(zeros, 1)), generator=generator)
        operands = [int(point) | 0xABCDE00 for pair in points.T for point in pair] if zeros else []  # low bytes count
        text, constraints = assembly(kind, dtype, (), zeros)
        inputs = registers_of(kind, codes) + operands
        assert constraints.count(",r") == len(inputs)
        found = torch.stack([_halves(register, DTYPES[dtype]) for register in Machine(inputs).run(text)], dim=1)
        of_slab = points.repeat_interleave(8 // max(zeros, 1), dim=1) if zeros else torch.full((2, 8), 1 << (bits - 1))
        assert torch.equal(found.float(), (codes.int() - of_slab).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_tables(kind: str, dtype: str) -> None:
    table = table_of(kind)
    text, constraints = assembly(kind, dtype, tuple(table.tolist()))
    generator = torch.Generator().manual_seed(4)
    for _ in range(40):
        codes = torch.randint(0, 16, (2, 8), generator=generator).to(torch.uint8)
        inputs = registers_of(kind, codes)
        assert constraints.count(",r") == len(inputs)
        found = torch.stack([_halves(register, DTYPES[dtype]) for register in Machine(inputs).run(text)], dim=1)
        assert torch.equal(found, table[codes.long()].to(DTYPES[dtype]))
