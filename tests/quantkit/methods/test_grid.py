"""The grid search against brute force."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.formats import Awq, CtPacked, Gptq, IntegerFormat
from quantkit.methods.grid import SHRINK, diagonal_blocks, search_grid

Layers = Callable[..., tuple[Tensor, Tensor]]

FORMATS = [
    Gptq(bits=2, group_size=32),
    Gptq(bits=3, sym=False, group_size=64),
    Awq(group_size=128),
    CtPacked(bits=4, group_size=-1),
    CtPacked(bits=8, sym=False, group_size=64),
]


def group_losses(weight: Tensor, rounded: Tensor, hessian: Tensor, width: int) -> Tensor:
    """Squared error of the outputs if only one group were rounded, [out, groups] in float64."""
    error = (weight - rounded).double()
    losses = []
    for start in range(0, weight.shape[1], width):
        part = slice(start, start + width)
        losses.append(torch.einsum("oi,ij,oj->o", error[:, part], hessian.double()[part, part], error[:, part]))
    return torch.stack(losses, 1)


def rounded_by_hand(row: Tensor, bits: int, sym: bool, shrink: float) -> Tensor:
    """One row on the grid that covers this share of its range, scales in float32."""
    top = 2**bits - 1
    low, high = shrink * min(float(row.min()), 0.0), shrink * max(float(row.max()), 0.0)
    scale = 2 * max(-low, high) / top if sym else (high - low) / top
    zero = 2 ** (bits - 1) if sym else round(-low / scale)
    codes = [min(max(round(value / scale) + zero, 0), top) for value in row.tolist()]
    return torch.tensor([scale * (code - zero) for code in codes], dtype=torch.float64)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.name} {fmt.describe()}")
@pytest.mark.parametrize("seed", [0, 1])
def test_no_group_is_worse_than_on_its_extremes(layer: Layers, fmt: IntegerFormat, seed: int) -> None:
    weight, inputs = layer(seed)
    hessian = inputs.T @ inputs
    width = fmt.group_width(weight.shape[1])
    searched = group_losses(weight, search_grid(weight, fmt, hessian).dequantize(), hessian, width)
    extremes = group_losses(weight, fmt.quantize(weight).dequantize(), hessian, width)
    assert bool((searched <= extremes * 1.0001).all())
    if fmt.bits < 8:
        assert float(searched.sum()) < 0.95 * float(extremes.sum())


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("sym", [True, False])
def test_one_group_is_brute_force(layer: Layers, bits: int, sym: bool) -> None:
    weight, inputs = layer(2, inputs=64, outputs=12)
    hessian = (inputs.T @ inputs).double()
    found = search_grid(weight, CtPacked(bits=bits, group_size=-1, sym=sym, dtype="float32"), hessian.float())
    for row, decoded in zip(weight, found.dequantize().double(), strict=True):
        errors = [row.double() - rounded_by_hand(row, bits, sym, shrink) for shrink in SHRINK]
        least = min(float(error @ hessian @ error) for error in errors)
        error = row.double() - decoded
        assert float(error @ hessian @ error) == pytest.approx(least, rel=1e-3)


def test_result_is_what_the_format_can_store(layer: Layers) -> None:
    weight, inputs = layer(3)
    for fmt in FORMATS:
        found = search_grid(weight, fmt, inputs.T @ inputs)
        assert torch.equal(fmt.decode(fmt.pack(found)), found.dequantize())


def test_groups_that_calibration_never_reached_keep_their_extremes(layer: Layers) -> None:
    weight, inputs = layer(4)
    inputs[:, 64:128] = 0
    fmt = Gptq(bits=3, group_size=64)
    found, plain = search_grid(weight, fmt, inputs.T @ inputs), fmt.quantize(weight)
    assert torch.equal(found.scales[:, 1], plain.scales[:, 1])
    assert torch.equal(found.codes[:, 64:128], plain.codes[:, 64:128])
    assert not torch.equal(found.scales, plain.scales)


def test_diagonal_blocks() -> None:
    hessian = torch.arange(36.0).view(6, 6)
    blocks = diagonal_blocks(hessian, 2)
    assert blocks.shape == (3, 2, 2)
    assert torch.equal(blocks[1], hessian[2:4, 2:4])
