"""The grid search against brute force."""

from collections.abc import Callable
from itertools import product

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


def rounded_by_hand(row: Tensor, bits: int, sym: bool, shrink: float, sign: float = 1.0) -> Tensor:
    """One row on the grid that covers this share of its range, scales in float32, so that ties break as they do."""
    top = 2**bits - 1
    low, high = shrink * row.min().clamp(max=0), shrink * row.max().clamp(min=0)
    scale = sign * 2 * torch.maximum(-low, high) / top if sym else (high - low) / top
    zero = 2 ** (bits - 1) if sym else round(float(-low / scale))
    codes = [min(max(round(float(value)) + zero, 0), top) for value in row / scale]
    return torch.tensor([float(scale) * (code - zero) for code in codes], dtype=torch.float64)


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
        heavy = -1.0 if row.max() > -row.min() else 1.0
        signs = [1.0] if not sym else [heavy] if bits == 4 else [1.0, -1.0]
        tried = [(1.0, 1.0), *list(product(SHRINK, signs))[1:]]
        errors = [row.double() - rounded_by_hand(row, bits, sym, *each) for each in tried]
        least = min(float(error @ hessian @ error) for error in errors)
        error = row.double() - decoded
        assert float(error @ hessian @ error) == pytest.approx(least, rel=1e-3)


def heavy_tailed(outputs: int, inputs: int) -> Tensor:
    """Of both signs, some rows with a tail on one side."""
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    weight = weight * (0.7 * torch.randn(outputs, inputs, generator=generator)).exp()
    weight[::3] = weight[::3].abs() - 0.5
    weight[1::3] = 0.5 - weight[1::3].abs()
    return weight


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("outputs", "inputs", "size"), [(7, 192, 64), (33, 96, 32), (5, 77, -1)])
def test_a_mirrored_weight_gets_the_mirrored_grid(outputs: int, inputs: int, size: int, bits: int, sym: bool) -> None:
    """Which side has one code more follows from the weights; at 8 bits it is always the same."""
    weight, hessian = heavy_tailed(outputs, inputs), torch.eye(inputs)
    fmt = CtPacked(bits=bits, group_size=size, sym=sym, dtype="float32")
    found, mirrored = search_grid(weight, fmt, hessian), search_grid(-weight, fmt, hessian)
    if sym and bits < 8:
        assert bool((found.scales < 0).any() and (found.scales > 0).any())
        best = (found.scales == -mirrored.scales).float().mean()
        assert float(best) > 0.9  # where the extremes are not the best already
    else:
        assert bool((found.scales > 0).all())


@pytest.mark.parametrize(("bits", "least"), [(2, 0.8), (3, 0.9), (4, 0.95)])
def test_the_extra_code_lowers_the_error(bits: int, least: float) -> None:
    """Against the best grid with a positive scale, found by brute force, on groups with heavy tails."""
    weight = heavy_tailed(21, 128)
    fmt = CtPacked(bits=bits, group_size=64, dtype="float32")
    found = search_grid(weight, fmt, torch.eye(128))
    groups = weight.view(-1, 64)
    positive = torch.stack(
        [
            (group.double() - torch.stack([rounded_by_hand(group, bits, True, ratio) for ratio in SHRINK]))
            .square()
            .sum(-1)
            .amin()
            for group in groups
        ]
    )
    signed = (found.dequantize() - weight).double().view(-1, 64).square().sum(-1)
    assert float(signed.sum()) < least * float(positive.sum())
    if bits <= 3:
        assert bool((signed <= positive * 1.0001).all())


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
