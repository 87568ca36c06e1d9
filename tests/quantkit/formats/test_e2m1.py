"""MXFP4 and NVFP4 by hand: codes, the order of nibbles, scales, and what the search over scales is allowed to do."""

import pytest
import torch
from torch import Tensor

from quantkit.errors import CannotHold
from quantkit.formats import BlockMxfp4, CodebookWeight, CtMxfp4, CtNvfp4, Format, Nf4
from quantkit.formats.codebook import DividedScales
from quantkit.formats.e2m1 import pack_codes, power_table, round_to_e2m1, unpack_codes

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def plain_error(weight: Tensor, scales: Tensor, size: int) -> Tensor:
    """The least squared error of every block under a scale, by trying all values."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float64)
    steps = scales.double().view(-1, 1, 1)
    distances = weight.double().view(-1, size, 1) - table * steps  # [blocks, size, 16]
    return distances.abs().amin(-1).square().sum(-1)


def weight_of(out: int, inputs: int, seed: int = 0) -> Tensor:
    return 0.05 * torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed))


def test_codes_are_sign_and_place() -> None:
    both = torch.tensor(VALUES + [-value for value in VALUES])
    assert round_to_e2m1(both).tolist() == [*range(8), 0, *range(9, 16)]  # plain zero has no sign


def test_ties_go_to_the_even_code_and_large_values_to_the_largest() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 100.0])
    assert round_to_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7]
    assert round_to_e2m1(-ties)[1:].tolist() == [10, 10, 12, 12, 14, 14, 15, 15]


def test_the_earlier_code_is_in_the_low_half() -> None:
    codes = torch.arange(16, dtype=torch.uint8)[None]
    assert pack_codes(codes).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(unpack_codes(pack_codes(codes)), codes)


def test_every_power_of_two_is_kept() -> None:
    """Also 2**-127, which bfloat16 has only below its normal range, and the byte that is no number."""
    powers = power_table()
    assert powers[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert bool(powers[255].isnan())
    parts = {"weight_packed": torch.zeros(8, 512, dtype=torch.uint8), "weight_scale": torch.arange(256).view(8, 32)}
    again = CtMxfp4().pack(CtMxfp4().unpack(parts | {"weight_scale": parts["weight_scale"].to(torch.uint8)}))
    assert torch.equal(again["weight_scale"].flatten().int(), torch.arange(256).int())


def test_both_mxfp4_layouts_hold_the_same_bytes() -> None:
    quantized = CtMxfp4().quantize(weight_of(6, 96))
    there, here = BlockMxfp4().pack(quantized), CtMxfp4().pack(quantized)
    assert there["blocks"].shape == (6, 3, 16)
    assert torch.equal(there["blocks"].flatten(1), here["weight_packed"])
    assert torch.equal(there["scales"], here["weight_scale"])


@pytest.mark.parametrize("fmt", [CtMxfp4(), CtNvfp4()], ids=lambda fmt: fmt.name)
def test_a_block_never_loses_more_than_by_the_plain_rule(fmt: Format) -> None:
    weight = weight_of(64, 128)
    quantized = fmt.quantize(weight)
    assert isinstance(quantized, CodebookWeight)
    blocks = weight.view(-1, quantized.block)
    largest = blocks.abs().amax(-1)
    if isinstance(quantized.absmax, DividedScales):
        divisor = quantized.absmax.divisor
        assert float(divisor) == pytest.approx(448 * 6 / float(weight.abs().max()))
        plain = (largest / 6 * divisor).to(torch.float8_e4m3fn).float() / divisor
    else:
        plain = torch.exp2(torch.floor(torch.log2(largest)) - 2)
    found = (quantized.dequantize() - weight).double().view(-1, quantized.block).square().sum(-1)
    assert torch.allclose(found, plain_error(weight, quantized.block_scales, quantized.block), rtol=1e-4)
    limit = plain_error(weight, plain, quantized.block)
    assert bool((found <= limit * (1 + 1e-4)).all())
    assert float(found.sum()) < 0.97 * float(limit.sum())


@pytest.mark.parametrize("fmt", [CtMxfp4(), CtNvfp4()], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("size", [0.0, 1e-37, 1e37], ids=str)
def test_sizes_at_the_ends_of_the_range(fmt: Format, size: float) -> None:
    weight = size * torch.sign(weight_of(4, 64))
    decoded = fmt.decode(fmt.encode(weight))
    assert bool(decoded.isfinite().all())
    if fmt.name == "ct-mxfp4" or size != 1e-37:  # the divisor would overflow: such tensors become zero
        torch.testing.assert_close(decoded, weight, rtol=0.25, atol=0)


def test_what_they_cannot_hold() -> None:
    nf4 = Nf4(block=32, double_quant=False).quantize(weight_of(4, 64))
    for fmt in (CtMxfp4(), CtNvfp4()):
        with pytest.raises(CannotHold, match="e2m1 table"):
            fmt.pack(nf4)
    with pytest.raises(CannotHold, match="blocks of 32"):
        CtMxfp4().pack(CtNvfp4().quantize(weight_of(4, 64)))
    with pytest.raises(CannotHold, match="8-bit scales"):
        CtNvfp4().pack(CtMxfp4().quantize(weight_of(4, 64)))


def test_stacked_layers_share_the_global_scale() -> None:
    parts = CtNvfp4().quantize(torch.cat([weight_of(8, 32), 3 * weight_of(4, 32, seed=1)])).split_rows([8, 4])
    assert [part.shape for part in parts] == [(8, 32), (4, 32)]
    first, second = (CtNvfp4().pack(part)["weight_global_scale"] for part in parts)
    assert torch.equal(first, second)
