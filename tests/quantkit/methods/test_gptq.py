"""GPTQ against independent arithmetic."""

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CtPacked, Gptq, IntegerFormat, Nf4
from quantkit.methods.gptq import Hessian, inverse_factor, output_loss, quantize_layer

FORMATS = [
    Gptq(group_size=32),
    Gptq(bits=3, group_size=64),
    Gptq(sym=False, group_size=32),
    CtPacked(bits=2, group_size=-1),
]


def random_layer(seed: int, inputs: int = 192) -> tuple[Tensor, Tensor]:
    """A weight and a Hessian of correlated inputs with a few large columns."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(48, inputs, generator=generator)
    mix = torch.randn(inputs, inputs, generator=generator) / inputs**0.5
    tokens = torch.randn(1024, inputs, generator=generator) @ mix
    tokens[:, :5] *= 8
    return weight, tokens.T @ tokens


def textbook(weight: Tensor, hessian: Tensor, fmt: IntegerFormat, damping: float) -> Tensor:
    """Optimal brain quantization in a fixed order, one column at a time, in float64, with an explicit inverse."""
    plain = fmt.quantize(weight)
    order = torch.argsort(hessian.diagonal(), descending=True)
    work = weight.double()[:, order]
    damped = hessian.double()[order][:, order]
    damped += damping * damped.diagonal().mean() * torch.eye(len(damped), dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    group = plain.input_groups()[order]
    result = torch.empty_like(work)
    for i in range(work.shape[1]):
        scale, zero = plain.scales.double()[:, group[i]], plain.zeros.double()[:, group[i]]
        code = (torch.round(work[:, i] / scale) + zero).clamp(0, 2**fmt.bits - 1)
        result[:, i] = scale * (code - zero)
        error = (work[:, i] - result[:, i]) / inverse[i, i]
        work -= error[:, None] * inverse[i]
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, i] = 1.0  # this column is done; keep the division defined
    final = torch.empty_like(result)
    final[:, order] = result
    return final


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.describe())
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_textbook(fmt: IntegerFormat, seed: int) -> None:
    weight, hessian = random_layer(seed)
    ours = quantize_layer(weight, fmt, hessian)
    expected = textbook(weight, hessian, fmt, ours.damping)
    same = (ours.quantized.dequantize().double() - expected).abs() < 1e-6
    assert float(same.double().mean()) > 0.995  # float32 may break a tie the other way, and the rest follows
    assert ours.loss == pytest.approx(output_loss(weight, expected.float(), hessian), rel=0.02)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.describe())
def test_identity_hessian_is_plain_rounding(fmt: IntegerFormat) -> None:
    weight, _ = random_layer(3)
    result = quantize_layer(weight, fmt, torch.eye(weight.shape[1]))
    assert torch.equal(result.quantized.codes, fmt.quantize(weight).codes)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.describe())
@pytest.mark.parametrize("seed", range(5))
def test_never_worse_than_plain_rounding(fmt: IntegerFormat, seed: int) -> None:
    weight, hessian = random_layer(seed, inputs=128)
    result = quantize_layer(weight, fmt, hessian)
    assert result.loss <= result.rounding_loss
    assert result.loss < 0.8 * result.rounding_loss  # and on correlated inputs clearly better


def test_dead_columns_and_dead_layers() -> None:
    weight, hessian = random_layer(4)
    hessian[:, 7] = hessian[7] = 0
    result = quantize_layer(weight, Gptq(group_size=64), hessian)
    assert result.loss < result.rounding_loss
    untouched = quantize_layer(weight, Gptq(group_size=64), torch.zeros_like(hessian))
    assert torch.equal(untouched.quantized.codes, Gptq(group_size=64).quantize(weight).codes)


def test_damping_grows_until_the_factor_exists() -> None:
    direction = torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(1)), dim=0)
    alive = torch.zeros(64, dtype=torch.bool)
    bent = torch.eye(64) - 1.05 * torch.outer(direction, direction)  # one eigenvalue of -0.05, as rounding may leave it
    factor, damping = inverse_factor(bent, alive, 0.01)
    assert damping == pytest.approx(0.1)
    damped = bent + damping * bent.diagonal().mean() * torch.eye(64)
    assert torch.allclose(factor.T @ factor @ damped, torch.eye(64), atol=1e-4)
    with pytest.raises(InputError, match="not finite"):
        inverse_factor(torch.full((4, 4), float("nan")), alive[:4], 0.01)


def test_hessian_adds_up_batches() -> None:
    inputs = torch.randn(3, 50, 16)
    hessian = Hessian(16)
    for part in inputs:
        hessian.add(part)
    flat = inputs.flatten(0, 1)
    assert torch.allclose(hessian.matrix, flat.T @ flat, rtol=1e-4, atol=1e-4)
    assert hessian.tokens == 150


def test_tables_are_refused() -> None:
    with pytest.raises(InputError, match="integer grid"):
        quantize_layer(torch.randn(8, 64), Nf4(), torch.eye(64))
