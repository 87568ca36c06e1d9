"""Layers joined along their outputs compute what they compute apart."""

import pytest
import torch

from long_cases import others_long
from quantkit.formats import CtFloat8, CtInt8, CtMxfp4, CtNvfp4, CtPacked, Format, Fp4, LlmInt8, Nf4
from quantkit.kernels.card import NO_GPU
from quantkit.kernels.linear.eight_bit.weight import lay_out as lay_out_eight_bit
from quantkit.kernels.linear.fuse import join
from quantkit.kernels.linear.op import LinearWeight, run
from quantkit.kernels.linear.weight import Choice
from quantkit.kernels.linear.weight_only.skinny import SkinnyConfig
from quantkit.kernels.linear.weight_only.weight import lay_out as lay_out_packed

pytestmark = pytest.mark.kernel

SHORT = (CtPacked(), CtPacked(sym=False), CtPacked(bits=3), Nf4(), LlmInt8(), CtFloat8(strategy="block"), CtNvfp4())
FORMATS = (
    *(*SHORT, CtPacked(group_size=32), CtPacked(bits=8), Fp4(), Nf4(double_quant=False), CtInt8(), CtFloat8()),
    CtMxfp4(),
)


def weight_of(fmt: Format, outputs: int, inputs: int, device: str, scale: float = 0.02) -> LinearWeight:
    generator = torch.Generator().manual_seed(outputs)
    quantized = fmt.quantize(torch.randn(outputs, inputs, generator=generator).mul(scale).to(device, torch.bfloat16))
    eight_bit = isinstance(fmt, LlmInt8 | CtInt8 | CtFloat8)
    return lay_out_eight_bit(fmt, quantized) if eight_bit else lay_out_packed(quantized)


def multiply(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    return run(weight.default(8, NO_GPU), x, weight)


@pytest.mark.parametrize("fmt", others_long(FORMATS, SHORT), ids=lambda fmt: fmt.describe())
def test_joined_layers_give_the_same(fmt: Format, device: str) -> None:
    parts = [weight_of(fmt, outputs, 256, device, scale) for outputs, scale in ((128, 0.02), (128, 0.5), (72, 0.1))]
    joined = join(parts)
    assert joined is not None
    assert joined.outputs == 328
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    apart = torch.cat([multiply(x, part) for part in parts], 1)
    torch.testing.assert_close(multiply(x, joined), apart, rtol=2e-2, atol=2e-2)


def test_layers_joined_within_one_tile_keep_their_offsets(device: str) -> None:
    """Scales of the second level have an offset for each layer, and a tile of 256 outputs has two of them."""
    parts = [weight_of(Nf4(), 128, 128, device, scale) for scale in (0.02, 5.0)]
    joined = join(parts)
    assert joined is not None
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    tile = Choice("skinny", SkinnyConfig(256, 8, 8, 3, copies=32), "")
    apart = torch.cat([multiply(x, part) for part in parts], 1)
    torch.testing.assert_close(run(tile, x, joined), apart, rtol=2e-2, atol=2e-2)


def test_what_does_not_fit_is_left_apart(device: str) -> None:
    w4 = weight_of(CtPacked(), 128, 256, device)
    assert join([w4]) is w4
    assert join([w4, weight_of(CtPacked(group_size=64), 128, 256, device)]) is None
    assert join([w4, weight_of(CtPacked(bits=8), 128, 256, device)]) is None
    assert join([w4, weight_of(LlmInt8(), 128, 256, device)]) is None
    assert join([weight_of(CtPacked(), 72, 256, device), w4]) is None  # does not end with a tile
    int8 = weight_of(LlmInt8(), 128, 256, device)
    assert join([int8, weight_of(LlmInt8(threshold=3.0), 128, 256, device)]) is None
    nf4 = weight_of(Nf4(), 128, 128, device)  # 256 blocks: one block of second-level scales
    assert join([nf4, nf4]) is not None
    few = weight_of(Nf4(), 128, 64, device)  # half of one
    assert join([few, few]) is None
