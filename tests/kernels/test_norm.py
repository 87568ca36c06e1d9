"""RMSNorm against its meaning in torch and against transformers' modules."""

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quantkit.errors import InputError
from quantkit.kernels.norm import add_rms_norm, rms_norm
from quantkit.kernels.reference import elementwise as reference

pytestmark = pytest.mark.kernel

SHAPES = [(1, 4096), (3, 576), (5, 100), (7, 1), (2, 33)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def make(tokens: int, width: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 1000 + width)
    x, residual = 2 * torch.randn(2, tokens, width, generator=generator)
    weight = 1 + 0.2 * torch.randn(width, generator=generator)
    return x.to(device, dtype), residual.to(device, dtype), weight.to(device, dtype)


def assert_same(result: torch.Tensor, expected: torch.Tensor) -> None:
    """To the last bit, but for few elements: sums in another order may fall on the other side of a rounding."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    ulp = torch.finfo(result.dtype).eps
    cut_off = result.dtype == torch.bfloat16 and result.device.type == "cpu"  # Triton's interpreter does not round it
    if result.dtype != torch.float32 and not cut_off:
        assert float((result == expected).double().mean()) > 0.99
    torch.testing.assert_close(result, expected, rtol=4 * ulp, atol=1e-6)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_norm_as_in_torch(tokens: int, width: int, dtype: torch.dtype, plus_one: bool, device: str) -> None:
    x, residual, weight = make(tokens, width, dtype, device)
    assert_same(rms_norm(x, weight, 1e-5, plus_one=plus_one), reference.rms_norm(x, weight, 1e-5, plus_one=plus_one))
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5, plus_one=plus_one)
    out = torch.empty_like(x)
    assert add_rms_norm(x, residual, weight, 1e-5, plus_one=plus_one, out=out) is out
    assert_same(residual, expected_residual)
    assert_same(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_as_in_transformers(dtype: torch.dtype, device: str) -> None:
    x, _, weight = make(4, 192, dtype, device)
    for module, plus_one in ((LlamaRMSNorm(192, eps=1e-5), False), (Gemma2RMSNorm(192, eps=1e-5), True)):
        module.weight.data = weight
        with torch.no_grad():
            assert_same(rms_norm(x, weight, 1e-5, plus_one=plus_one), module(x))


def test_strided_rows_and_in_place(device: str) -> None:
    wide, residual, weight = make(5, 96, torch.float16, device)
    x, weight = wide[:, 16:80], weight[:64]
    residual = residual[:, :64]
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-6)
    untouched = wide[:, 80:].clone()
    assert add_rms_norm(x, residual, weight, 1e-6, out=x) is x
    assert_same(x, expected)
    assert_same(residual, expected_residual)
    assert torch.equal(wide[:, 80:], untouched)


def test_nothing_to_do(device: str) -> None:
    x, residual, weight = make(0, 64, torch.float16, device)
    assert rms_norm(x, weight, 1e-6).shape == (0, 64)
    assert add_rms_norm(x, residual, weight, 1e-6).shape == (0, 64)


def test_refuses_what_it_cannot_take(device: str) -> None:
    x, residual, weight = make(2, 64, torch.float16, device)
    refused = [
        ("float64", lambda: rms_norm(x.double(), weight.double(), 1e-6)),
        ("weight is float32", lambda: rms_norm(x, weight.float(), 1e-6)),
        (r"weight has shape \[63\]", lambda: rms_norm(x, weight[:63], 1e-6)),
        (r"x has shape \[64\]", lambda: rms_norm(x[0], weight, 1e-6)),
        ("last dimension of x", lambda: rms_norm(x.t().contiguous().t(), weight, 1e-6)),
        (r"residual has shape \[1, 64\]", lambda: add_rms_norm(x, residual[:1], weight, 1e-6)),
        ("out is float32", lambda: rms_norm(x, weight, 1e-6, out=x.float())),
        ("one device", lambda: rms_norm(x, weight.to("meta"), 1e-6)),
        ("at most 32768", lambda: rms_norm(x.new_zeros(1, 32769), x.new_zeros(32769), 1e-6)),
    ]
    for words, call in refused:
        with pytest.raises(InputError, match=words):
            call()
