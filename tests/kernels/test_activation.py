"""The gated activation against its meaning in torch and against transformers' activations."""

import pytest
import torch
from transformers.activations import ACT2FN

from quantkit.errors import InputError
from quantkit.kernels.activation import ACTIVATIONS, gated_activation
from quantkit.kernels.reference import elementwise as reference

pytestmark = pytest.mark.kernel


def make(tokens: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens * 1000 + width)
    return (3 * torch.randn(tokens, 2 * width, generator=generator)).to(device, dtype)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Few roundings apart: exp differs in its last bit, and the interpreter cuts bfloat16 off instead of rounding.

    Where 1 + tanh nearly vanishes, torch's own float32 is up to 3e-6 away from float64 on ARM.
    """
    assert result.dtype == expected.dtype
    ulp = torch.finfo(result.dtype).eps
    ulp *= 8 if result.dtype == torch.float32 else 2
    torch.testing.assert_close(result, expected, rtol=ulp, atol=5e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1100), (3, 100), (5, 1)])
def test_gated_activation(tokens: int, width: int, dtype: torch.dtype, activation: str, device: str) -> None:
    gate_up = make(tokens, width, dtype, device)
    result = gated_activation(gate_up, activation)
    assert_close(result, reference.gated_activation(gate_up, activation))
    assert_close(result, ACT2FN[activation](gate_up[:, :width]) * gate_up[:, width:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_clipped(dtype: torch.dtype, device: str) -> None:
    """As gpt-oss computes it, in float64."""
    gate_up = make(3, 100, dtype, device)
    gate, up = gate_up.double().chunk(2, -1)
    gate, up = gate.clamp(max=2.5), up.clamp(-2.5, 2.5)
    exact = ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(dtype)
    ulps = 8 * torch.finfo(dtype).eps
    for compute in (gated_activation, reference.gated_activation):
        torch.testing.assert_close(compute(gate_up, "silu", clip=(2.5, 1.702)), exact, rtol=ulps, atol=ulps)
    assert not torch.equal(exact, gated_activation(gate_up, "silu"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extremes_stay_finite(activation: str, device: str) -> None:
    gate = torch.tensor([[-1e4, -100.0, -0.0, 0.0, 100.0, 1e4]], device=device)
    result = gated_activation(torch.cat((gate, torch.ones_like(gate)), dim=1), activation)
    assert_close(result, gate.clamp(min=0))


def test_strided_rows(device: str) -> None:
    gate_up = make(4, 64, torch.float16, device)[:, :96]
    wide = torch.zeros(4, 64, dtype=torch.float16, device=device)
    out = wide[:, :48]
    assert gated_activation(gate_up, "silu", out=out) is out
    assert_close(out, reference.gated_activation(gate_up, "silu"))
    assert not bool(wide[:, 48:].any())


def test_nothing_to_do(device: str) -> None:
    assert gated_activation(make(0, 8, torch.float16, device), "silu").shape == (0, 8)


def test_refuses_what_it_cannot_take(device: str) -> None:
    x = make(2, 8, torch.float16, device)
    refused = [
        ("activation 'relu'", lambda: gated_activation(x, "relu")),
        ("int32", lambda: gated_activation(x.int(), "silu")),
        ("must be even", lambda: gated_activation(x[:, :7], "silu")),
        (r"gate_up has shape \[16\]", lambda: gated_activation(x[0], "silu")),
        ("last dimension of gate_up", lambda: gated_activation(x[:, ::2], "silu")),
        (r"out has shape \[2, 16\]", lambda: gated_activation(x, "silu", out=x)),
        ("out is float32", lambda: gated_activation(x, "silu", out=x[:, :8].float())),
        ("one device", lambda: gated_activation(x, "silu", out=x[:, :8].to("meta"))),
    ]
    for words, call in refused:
        with pytest.raises(InputError, match=words):
            call()
