"""GPTQ towards the outputs of the model that is not quantized, against least squares."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CtPacked, Gptq, IntegerFormat
from quantkit.methods.gptq import GptqMethod, GptqResult, quantize_layer
from quantkit.methods.statistics import InputStatistics

Layers = Callable[..., tuple[Tensor, Tensor]]
TO_MODEL = GptqMethod(target="model")
FORMATS = [
    CtPacked(bits=2, group_size=64, sym=False),
    CtPacked(bits=3, group_size=-1),
    Gptq(bits=4, group_size=32),
    Gptq(bits=4, group_size=64, sym=False),
]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.name} {fmt.describe()}")


def drifted(exact: Tensor) -> Tensor:
    """What quantized layers might make of exact inputs [tokens, in]: mixed a little, and with noise."""
    generator = torch.Generator().manual_seed(11)
    width = exact.shape[1]
    mix = torch.eye(width) + 0.3 * torch.randn(width, width, generator=generator) / width**0.5
    return exact @ mix + 0.1 * exact.std() * torch.randn(exact.shape, generator=generator)


def statistics_of(inputs: Tensor, exact: Tensor) -> InputStatistics:
    statistics = InputStatistics(inputs.shape[1], drift=True)
    for part, place in zip(inputs.split(300), exact.split(300), strict=True):
        statistics.add(part, place)
    return statistics


def rounded(weight: Tensor, fmt: IntegerFormat, inputs: Tensor, exact: Tensor, method: GptqMethod) -> GptqResult:
    statistics = statistics_of(inputs, exact)
    assert statistics.drift is not None
    owed = weight @ statistics.drift if method.wants_drift else None
    return quantize_layer(weight, fmt, statistics.require_hessian(), method, owed)


def error(result: GptqResult, weight: Tensor, inputs: Tensor, exact: Tensor) -> Tensor:
    """Squared, of every output [out], towards those of exact inputs."""
    return (inputs @ result.quantized.dequantize().T - exact @ weight.T).square().sum(0)


@every_format
@pytest.mark.parametrize("order", ["none", "static"])
def test_is_nearer_to_the_outputs_of_the_model(layer: Layers, fmt: IntegerFormat, order: str) -> None:
    weight, exact = layer(1, inputs=192, outputs=23)
    inputs = drifted(exact)
    towards = [rounded(weight, fmt, inputs, exact, GptqMethod(order=order, target=each)) for each in ("layer", "model")]
    layers, models = (float(error(result, weight, inputs, exact).sum()) for result in towards)
    assert models < 0.95 * layers


def test_many_bits_are_half_way_to_the_least_squares_solution(layer: Layers) -> None:
    """And no row loses more than plain rounding does, in what the log says of both."""
    weight, exact = layer(2, inputs=96, outputs=17)
    inputs = drifted(exact)
    method = GptqMethod(target="model", damping=1e-6)
    found = rounded(weight, CtPacked(bits=8, group_size=32, dtype="float32"), inputs, exact, method)
    solution = torch.linalg.lstsq(inputs.double(), (exact @ weight.T).double()).solution.T
    moved, whole = found.quantized.dequantize() - weight, solution - weight
    assert float((moved - 0.5 * whole).norm() / whole.norm()) < 0.05
    assert bool((found.loss <= found.rounding_loss).all())


@every_format
def test_exact_inputs_change_nothing(layer: Layers, fmt: IntegerFormat) -> None:
    weight, exact = layer(3, inputs=128, outputs=16)
    one, other = (rounded(weight, fmt, exact, exact, method) for method in (GptqMethod(), TO_MODEL))
    assert torch.equal(one.quantized.codes, other.quantized.codes)
    assert torch.equal(one.quantized.scales, other.quantized.scales)
    assert torch.equal(one.loss, other.loss)


def test_inputs_that_were_always_0_keep_their_nearest_code(layer: Layers) -> None:
    weight, exact = layer(4, inputs=128, outputs=16)
    inputs = drifted(exact)
    inputs[:, 40:60] = 0
    found = rounded(weight, CtPacked(bits=4, group_size=32), inputs, exact, TO_MODEL).quantized
    steps = found.scales.float().abs()[:, found.input_groups()]
    inside = (weight.abs() < 7 * steps)[:, 40:60]
    off = (found.dequantize() - weight).abs()[:, 40:60]
    assert bool((off <= 0.501 * steps[:, 40:60])[inside].all())


def test_only_this_target_wants_to_know_the_drift() -> None:
    assert TO_MODEL.wants_drift
    assert not GptqMethod(target="layer").wants_drift
    with pytest.raises(InputError, match="target is 'original', but must be one of layer, model"):
        GptqMethod(target="original")


def test_drift_adds_up_and_is_divided_with_the_inputs(layer: Layers) -> None:
    _, exact = layer(5, inputs=24)
    inputs, scales = drifted(exact), torch.rand(24) + 0.5
    statistics = statistics_of(inputs, exact)
    assert statistics.drift is not None
    assert torch.allclose(statistics.drift, (exact - inputs).T @ inputs, rtol=1e-3, atol=1e-2)
    statistics.divide(scales)
    divided = ((exact - inputs) / scales).T @ (inputs / scales)
    assert torch.allclose(statistics.drift, divided, rtol=1e-3, atol=1e-2)
    assert statistics.take_drift() is not None
    assert statistics.take_drift() is None
    assert InputStatistics(24).drift is None
