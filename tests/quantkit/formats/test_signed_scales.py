"""Negative scales: every integer layout stores them, cuts, divides and converts them as it does positive ones."""

import pytest
import torch

from quantkit.errors import InputError
from quantkit.formats import Awq, CtInt8, CtPacked, Gguf, Gptq, IntegerFormat, IntegerWeight
from quantkit.formats.integer import round_scales
from quantkit.gguf_export.codes import as_blocks, block_kind
from signed_scales import with_signs

FORMATS: list[IntegerFormat] = [
    *(Gptq(bits=bits, group_size=32, version=version) for bits in (2, 3, 4, 8) for version in (1, 2)),
    Gptq(bits=4, group_size=-1, dtype="bfloat16"),
    Awq(group_size=32, sym=True),
    *(CtPacked(bits=bits, group_size=32) for bits in range(2, 9)),
    *(CtPacked(bits=3, group_size=-1, dtype=dtype) for dtype in ("float16", "float32")),
    CtInt8(),
]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.name} {fmt.describe()} {fmt.dtype}")


def plain(fmt: IntegerFormat) -> IntegerWeight:
    """[40, 96]."""
    return fmt.quantize(torch.randn(40, 96, generator=torch.Generator().manual_seed(0)))


def signed(fmt: IntegerFormat) -> IntegerWeight:
    weight = with_signs(plain(fmt))
    assert isinstance(weight, IntegerWeight)
    assert bool((weight.scales < 0).any() and (weight.scales > 0).any())
    return weight


@every_format
def test_what_is_stored_is_read(fmt: IntegerFormat) -> None:
    weight = signed(fmt)
    read = fmt.unpack(fmt.pack(weight))
    assert torch.equal(read.scales, weight.scales)
    assert torch.equal(read.dequantize(), weight.dequantize())
    assert torch.equal(read.dequantize().abs(), plain(fmt).dequantize().abs())
    assert not torch.equal(read.dequantize(), plain(fmt).dequantize())


@every_format
def test_parts_and_divided_rows(fmt: IntegerFormat) -> None:
    weight = signed(fmt)
    part = weight.cut(slice(3, 21), slice(32, 96))
    assert torch.equal(part.dequantize(), weight.dequantize()[3:21, 32:96])
    divided = weight.divide_rows(torch.full((40,), 4.0))
    assert torch.equal(divided.dequantize(), weight.dequantize() / 4)
    for found, expected in zip(weight.divisor_limits(), plain(fmt).divisor_limits(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_scales_stay_normal_on_both_sides_of_0(dtype: torch.dtype) -> None:
    kind = torch.finfo(dtype)
    stored = round_scales(torch.tensor([-1.5, -kind.tiny / 4, 0.0, kind.tiny / 4, 1.5]), dtype)
    assert stored.tolist() == [-1.5, -kind.tiny, kind.tiny, kind.tiny, 1.5]
    with pytest.raises(InputError, match="overflow"):
        round_scales(torch.tensor([1.0, -1e39]), dtype)


@pytest.mark.parametrize("bits", [4, 8])
def test_ggufs_blocks_hold_them(bits: int) -> None:
    fmt = CtPacked(bits=bits, group_size=32, dtype="float16")
    weight = signed(fmt)
    kind = block_kind("layer", fmt)
    blocks = as_blocks("layer", weight, kind)
    assert torch.equal(Gguf(kind).unpack({"weight": blocks}).dequantize(), weight.dequantize())
