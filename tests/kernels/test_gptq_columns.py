"""The GPTQ kernel against its meaning in torch; under Triton's interpreter where there is no GPU."""

import pytest
import torch

from quantkit.kernels.gptq_columns import round_columns
from quantkit.kernels.reference import gptq as reference

pytestmark = pytest.mark.kernel

SHAPES = [(1, 128, 40), (1, 128, 32), (3, 57, 33), (2, 1, 5), (1, 128, 1)]


def make(layers: int, width: int, out: int, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(width * 1000 + out)
    block = torch.randn(layers, width + 3, out, generator=generator)
    scale = 0.05 + 0.2 * torch.rand(layers, width, out, generator=generator)
    scale[..., ::3] *= -1  # grids that run the other way
    zero = torch.randint(0, 16, (layers, width, out), generator=generator).float()
    whole = torch.randn(layers, width + 7, width + 7, generator=generator).triu() * 0.1 + torch.eye(width + 7)
    return tuple(tensor.to(device) for tensor in (block, scale, zero, whole))


@pytest.mark.parametrize(("layers", "width", "out"), SHAPES)
def test_columns_as_in_torch(layers: int, width: int, out: int, device: str) -> None:
    block, scale, zero, whole = make(layers, width, out, device)
    block, factor = block[:, :width], whole[:, :width, :width]  # slices of larger matrices, as GPTQ passes them
    codes, errors = round_columns(block, scale, zero, factor, 15)
    expected_codes, expected_errors = reference.round_columns(block, scale, zero, factor, 15)
    same = codes == expected_codes
    assert float(same.double().mean()) > 0.99  # a tie may break the other way, and what follows it differs
    untouched = same.all(1, keepdim=True).expand_as(same)  # outputs without such a tie
    assert bool(untouched.any())
    assert torch.allclose(errors[untouched], expected_errors[untouched], rtol=1e-3, atol=1e-4)
