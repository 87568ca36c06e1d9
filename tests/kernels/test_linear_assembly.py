"""The PTX that decodes weights, run instruction by instruction: without a GPU nothing else sees it."""

import re
import struct

import pytest
import torch

from quantkit.formats.codebook import table_of
from quantkit.kernels.linear.weight_only.assembly import assembly, pair_table
from quantkit.kernels.linear.weight_only.weight import _lanes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WORD = 0xFFFFFFFF
TABLE = 0x400  # where the table of pairs begins


class Machine:
    """Registers of 32 bits of one thread, memory shared with others, and the instructions that `assembly` writes."""

    def __init__(self, inputs: list[int], thread: int = 0, memory: dict[int, int] | None = None) -> None:
        self.registers = {f"${8 + index}": value & WORD for index, value in enumerate(inputs)}
        self.registers.update({"%tid.x": thread, "pairs": TABLE})
        self.memory = memory if memory is not None else {}
        self.places: list[int] = []  # read or written, in order

    def run(self, text: str) -> list[int]:
        for guard, name, rest in re.findall(r"^\s*(@p )?([a-z][\w.]+) ([^;]*);", text, re.MULTILINE):
            target, *sources = [part.strip(" {}") for part in rest.split(",")]
            if name == "bar.sync" or (guard and not self.registers["p"]):
                continue
            if name == "st.shared.v4.b32":
                place = self.place(target, 16)
                self.memory.update({place + 4 * index: self.registers[source] for index, source in enumerate(sources)})
            elif name == "ld.shared.b32":
                self.registers[target] = self.memory[self.place(sources[0], 4)]
            else:
                values = [self.registers[part] if part in self.registers else int(part, 0) for part in sources]
                self.registers[target] = self.compute(name, values) & WORD
        return [self.registers.get(f"${slab}", 0) for slab in range(8)]

    def place(self, operand: str, size: int) -> int:
        """What an operand in brackets points at; the processor refuses other places than multiples of the size."""
        place = self.registers[operand.strip("[]")]
        assert place % size == 0
        self.places.append(place)
        return place

    def compute(self, name: str, values: list[int]) -> int:
        operation, _, kind = name.partition(".")
        if operation in ("sub", "fma"):
            return _pairwise(operation, kind.removeprefix("rn."), *values)
        return {
            "prmt": _permute,
            "lop3": _logic,
            "shr": lambda value, count: value >> count,
            "shl": lambda value, count: value << count,
            "and": lambda one, other: one & other,
            "xor": lambda one, other: one ^ other,
            "mov": lambda value: value,
            "add": lambda one, other: one + other,
            "mad": lambda one, other, third: one * other + third,
            "setp": lambda one, other: one < other,
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


def _pairwise(operation: str, kind: str, *operands: int) -> int:
    """Rounded once."""
    dtype = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}[kind]
    one, other, *third = (_halves(operand, dtype).double() for operand in operands)
    result = (one - other if operation == "sub" else one * other + third[0]).to(dtype)
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
@pytest.mark.parametrize(("dtype", "fused"), [("bf16", False), ("bf16", True), ("fp16", True)])
@pytest.mark.parametrize("kind", ["int2", "int3", "int4", "int8"])
def test_integers(kind: str, dtype: str, fused: bool, zeros: int) -> None:
    """`fused`: for cards that have no difference of bfloat16 alone; float16 has one everywhere."""
    bits = int(kind[3:])
    generator = torch.Generator().manual_seed(bits)
    for _ in range(20):
        codes = torch.randint(0, 1 << bits, (2, 8), generator=generator).to(torch.uint8)
        points = torch.randint(0, 1 << bits, (2, max(zeros, 1)), generator=generator)
        operands = [int(point) | 0xABCDE00 for pair in points.T for point in pair] if zeros else []  # low bytes count
        text, constraints = assembly(kind, dtype, (), zeros, fused=fused)
        assert ("sub.bf16x2" in text) == (dtype == "bf16" and not fused)
        inputs = registers_of(kind, codes) + operands
        assert constraints.count(",r") == len(inputs)
        found = torch.stack([_halves(register, DTYPES[dtype]) for register in Machine(inputs).run(text)], dim=1)
        of_slab = points.repeat_interleave(8 // max(zeros, 1), dim=1) if zeros else torch.full((2, 8), 1 << (bits - 1))
        assert torch.equal(found.float(), (codes.int() - of_slab).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nf4", "fp4", "e2m1"])
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


@pytest.mark.parametrize("threads", [32, 128, 256, 512])
@pytest.mark.parametrize("copies", [4, 16, 32])
def test_tables_of_pairs(copies: int, threads: int) -> None:
    """All threads fill the shared memory, and each lane looks its codes up."""
    kind, dtype = ("nf4", "bf16") if copies == 32 else ("fp4", "fp16")
    table = table_of(kind)
    memory: dict[int, int] = {}
    fill = pair_table(dtype, tuple(table.tolist()), copies, threads)
    writers = [Machine([], thread, memory) for thread in range(threads)]
    for writer in writers:
        writer.run(fill)
    size = 256 * copies * 4
    assert f"pairs[{size}]" in fill
    assert sorted(memory) == list(range(TABLE, TABLE + size, 4))
    for places in zip(*(writer.places for writer in writers[:8]), strict=True):  # what is written in one cycle
        assert len({place // 16 % 8 for place in places}) >= copies // 4
    text, constraints = assembly(kind, dtype, tuple(table.tolist()), 0, copies)
    generator = torch.Generator().manual_seed(copies)
    readers = []
    for thread in range(threads - 32, threads):
        codes = torch.randint(0, 16, (2, 8), generator=generator).to(torch.uint8)
        inputs = registers_of(kind, codes)
        assert constraints.count(",r") == len(inputs)
        reader = Machine(inputs, thread, memory)
        found = torch.stack([_halves(register, DTYPES[dtype]) for register in reader.run(text)], dim=1)
        assert torch.equal(found, table[codes.long()].to(DTYPES[dtype]))
        readers.append(reader.places)
    for places in zip(*readers, strict=True):
        assert len({place // 4 % 32 for place in places}) >= copies  # a bank for every copy at least
