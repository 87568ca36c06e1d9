"""Codes and grids that can be learned: where they begin, and which way their gradients point."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.formats import Awq, CtPacked, Gptq, IntegerFormat, IntegerWeight
from quantkit.methods.gptq import quantize_layer
from quantkit.methods.learned_grid import LIMIT, REACH, LearnedGrid

Layers = Callable[..., tuple[Tensor, Tensor]]
FORMATS = [
    CtPacked(bits=3, group_size=32),
    CtPacked(bits=2, group_size=64, sym=False),
    CtPacked(bits=4, group_size=-1, sym=False, dtype="bfloat16"),
    Awq(group_size=32, sym=False),
    Gptq(bits=3, group_size=32, sym=False),  # has no zero point 0
]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.name} {fmt.describe()}")


@pytest.fixture
def begun(layer: Layers) -> Callable[[IntegerFormat], tuple[Tensor, IntegerWeight, LearnedGrid]]:
    """`begun(fmt)`: a weight, what GPTQ makes of it, and the grid that begins there."""

    def begin(fmt: IntegerFormat) -> tuple[Tensor, IntegerWeight, LearnedGrid]:
        weight, seen = layer(0, inputs=128, outputs=24)
        start = quantize_layer(weight, fmt, seen.T @ seen).quantized
        return weight, start, LearnedGrid(weight, start, fmt)

    return begin


def scatter(grid: LearnedGrid, size: float = 1.0) -> None:
    """Moves all parameters, up to a share of their limits."""
    generator = torch.Generator().manual_seed(1)
    for parameter in grid.parameters:
        parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * LIMIT * size)


def decoded_by(grid: LearnedGrid) -> Tensor:
    weight = torch.empty_like(grid.anchors).flatten(1)
    grid.decode_to(weight)
    return weight


def plain_weight(grid: LearnedGrid, start: IntegerWeight, fmt: IntegerFormat, parameters: list[Tensor]) -> Tensor:
    """What a grid decodes to, as a formula that autograd takes apart: rounding counts as a constant that is added."""

    def rounded(value: Tensor, nearest: Tensor | None = None) -> Tensor:
        return value + ((torch.round(value) if nearest is None else nearest) - value).detach()

    offsets, *ends = parameters
    top, scales, zeros = 2**fmt.bits - 1, start.scales.float(), start.zeros.float()
    if fmt.sym:
        scales = scales + scales * REACH * ends[0]
        scales = rounded(scales, scales.to(start.scales.dtype).float())
    else:
        low = -scales * zeros + scales * REACH * ends[0] * top / 2
        high = scales * (top - zeros) + scales * REACH * ends[1] * top / 2
        scales = (high - low) / top
        scales = rounded(scales, scales.to(start.scales.dtype).float())
        zeros = rounded(-low / scales).clamp(fmt.zero_floor, top)
    codes = rounded(grid.anchors / scales[..., None] + offsets) + zeros[..., None]
    return ((codes.clamp(0, top) - zeros[..., None]) * scales[..., None]).flatten(1)


@every_format
def test_it_begins_with_the_codes_that_it_was_given(begun: Callable[..., object], fmt: IntegerFormat) -> None:
    weight, start, grid = begun(fmt)  # type: ignore[misc]
    found = grid.rounded()
    nearest = torch.round(weight.unflatten(1, (-1, start.group_size)) / start.scales.float().unsqueeze(-1)).flatten(1)
    apart = nearest - (start.codes.float() - start.zeros.float().repeat_interleave(start.group_size, 1))
    assert apart.abs().max() >= 1  # codes of GPTQ are not always the nearest
    for part in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(found, part), getattr(start, part))
    assert found.scales.dtype == start.scales.dtype


@every_format
def test_gradients_are_those_of_the_formula(begun: Callable[..., object], fmt: IntegerFormat) -> None:
    _, start, grid = begun(fmt)  # type: ignore[misc]
    scatter(grid)
    parameters = [parameter.clone().requires_grad_() for parameter in grid.parameters]
    decoded = plain_weight(grid, start, fmt, parameters)
    assert torch.allclose(decoded_by(grid), decoded, atol=1e-5)
    upstream = torch.randn(decoded.shape, generator=torch.Generator().manual_seed(2))
    for found, expected in zip(
        grid.gradients(upstream), torch.autograd.grad(decoded, parameters, upstream), strict=True
    ):
        assert found.abs().max() > 0
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


@every_format
def test_wherever_it_is_the_format_stores_it(begun: Callable[..., object], fmt: IntegerFormat) -> None:
    _, _, grid = begun(fmt)  # type: ignore[misc]
    for size in (0.3, 1.0):
        scatter(grid, size)
        assert torch.equal(fmt.unpack(fmt.pack(grid.rounded())).dequantize(), decoded_by(grid))


def test_a_weight_moves_by_one_code_at_most() -> None:
    fmt = CtPacked(bits=4, group_size=32)
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    start = fmt.quantize(weight)
    grid = LearnedGrid(weight, start, fmt)
    for offset in (-LIMIT, LIMIT):
        grid.offsets.fill_(offset)
        moved = (grid.rounded().codes.float() - start.codes.float()) * (1 if offset > 0 else -1)
        assert set(moved.unique().tolist()) == {0.0, 1.0}
