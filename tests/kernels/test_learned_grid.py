"""The kernels of learned rounding against their meaning in torch; under Triton's interpreter where there is no GPU."""

import pytest
import torch

from quantkit.kernels import learned_grid
from quantkit.kernels.reference import learned_grid as reference

pytestmark = pytest.mark.kernel

SHAPES = [(3, 2, 64, 3), (5, 3, 128, 4), (2, 1, 100, 2), (1, 1, 3000, 4), (33, 1, 16, 8)]  # out, groups, size, bits


def make(out: int, groups: int, size: int, bits: int, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(out * 1000 + size)
    scales = 0.05 + 0.2 * torch.rand(out, groups, generator=generator)
    scales[::2] *= -1  # grids that run the other way
    zeros = torch.randint(0, 2**bits, (out, groups), generator=generator).float()
    anchors = torch.randn(out, groups, size, generator=generator) * 0.1 * 2**bits  # some beyond the grid's ends
    offsets = torch.rand(out, groups, size, generator=generator) - 0.5
    upstream = torch.randn(out, groups * size, generator=generator)
    return tuple(tensor.to(device) for tensor in (upstream, anchors, offsets, scales, zeros))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_as_in_torch(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    upstream, *grid = make(*shape, device)
    found, expected = (torch.empty_like(upstream, dtype=dtype) for _ in range(2))
    learned_grid.decode(*grid, 2 ** shape[3] - 1, found)
    reference.decode(*grid, 2 ** shape[3] - 1, expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_as_in_torch(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
    upstream, *grid = make(*shape, device)
    anchors, offsets, scales, zeros = grid
    top = 2 ** shape[3] - 1
    codes = reference.unclamped(anchors, offsets, scales, zeros)
    assert bool((codes < 0).any() and (codes > top).any())  # both ends hold something
    found = learned_grid.gradients(upstream.to(dtype), *grid, top)
    expected = reference.gradients(upstream.to(dtype), *grid, top)
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
