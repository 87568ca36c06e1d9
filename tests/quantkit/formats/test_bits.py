"""The bit stream: published test vectors and round trips."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.formats.bits import pack, packed_width, unpack


def words(*values: int) -> torch.Tensor:
    return torch.tensor([v - (1 << 32) if v >= 1 << 31 else v for v in values], dtype=torch.int32)


@pytest.mark.parametrize(
    ("bits", "values", "expected"),
    [
        (4, [0, 1, 2, 3, 4, 5, 6, 7], words(0x76543210)),
        (4, [8] * 8, words(0x88888888)),
        (4, [7] * 8, words(0x77777777)),
        (8, [128] * 4, words(0x80808080)),
        (2, [2] * 16, words(0xAAAAAAAA)),
        (3, [3] * 32, words(0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D)),
        (3, [4] * 32, words(0x24924924, 0x49249249, 0x92492492)),
    ],
)
def test_known_words(bits: int, values: list[int], expected: torch.Tensor) -> None:
    assert torch.equal(pack(torch.tensor(values, dtype=torch.uint8), bits), expected)


@given(bits=st.integers(1, 8), rows=st.integers(1, 3), count=st.integers(1, 100), seed=st.integers(0, 2**16))
def test_round_trip(bits: int, rows: int, count: int, seed: int) -> None:
    values = torch.randint(0, 1 << bits, (rows, count), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack(values, bits)
    assert packed.shape == (rows, packed_width(count, bits))
    assert torch.equal(unpack(packed, bits, count), values)
    columns = packed.mT.clone(memory_format=torch.contiguous_format).mT
    assert torch.equal(unpack(columns, bits, count), values), "stored the other way round"


@given(bits=st.integers(1, 8), count=st.integers(1, 80), seed=st.integers(0, 2**16))
def test_equals_one_big_integer(bits: int, count: int, seed: int) -> None:
    """The definition itself: value k starts at bit k * bits of one little-endian number."""
    values = torch.randint(0, 1 << bits, (count,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    number = sum(int(value) << (k * bits) for k, value in enumerate(values))
    packed = pack(values, bits)
    assert number == sum((int(word) & 0xFFFFFFFF) << (32 * k) for k, word in enumerate(packed))
