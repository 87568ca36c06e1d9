"""The GPTQ kernel against its meaning in torch; under Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SHAPES = [(128, 40), (128, 32), (57, 33), (1, 5), (128, 1)]


def make(width: int, out: int, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(width * 1000 + out)
    block = torch.randn(width, out, generator=generator)
    scale = 0.05 + 0.2 * torch.rand(width, out, generator=generator)
    zero = torch.randint(0, 16, (width, out), generator=generator).float()
    whole = torch.randn(width + 7, width + 7, generator=generator).triu() * 0.1 + torch.eye(width + 7)
    return tuple(tensor.to(device) for tensor in (block, scale, zero, whole))


def compare(width: int, out: int, device: str) -> None:
    from quantkit.kernels import reference
    from quantkit.kernels.gptq_columns import round_columns

    block, scale, zero, whole = make(width, out, device)
    factor = whole[:width, :width]  # a slice of a larger matrix, as GPTQ passes it
    codes, errors = round_columns(block, scale, zero, factor, 15)
    expected_codes, expected_errors = reference.round_columns(block, scale, zero, factor, 15)
    same = codes == expected_codes
    assert float(same.double().mean()) > 0.99  # a tie may break the other way, and what follows it differs
    untouched = same.all(0)  # outputs without such a tie
    assert bool(untouched.any())
    assert torch.allclose(errors[:, untouched], expected_errors[:, untouched], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "out"), [*SHAPES, (128, 5000)])
def test_on_a_gpu(width: int, out: int) -> None:
    compare(width, out, "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_under_the_interpreter() -> None:
    """In a process of its own: Triton decides once, at import, whether it interprets."""
    code = f"from test_gptq_columns import *\nfor shape in {SHAPES}: compare(*shape, 'cpu')"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
