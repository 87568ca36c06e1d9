"""SmoothQuant's search: weights and inputs are both rounded, outliers move where they do the least harm."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CtInt8, Format, LlmInt8
from quantkit.methods.smoothquant import SmoothQuantMethod, candidates, search_scales
from quantkit.methods.statistics import InputStatistics
from quantkit.passes.folding import tied_heads

Layers = Callable[..., tuple[Tensor, Tensor]]


def untied(scales: Tensor) -> Tensor:
    return scales


def relative_loss(weight: Tensor, scales: Tensor, fmt: Format, inputs: Tensor) -> float:
    """Squared error of the outputs, relative to their square, of a layer that rounds its divided inputs too."""
    rounded = fmt.quantize(weight * scales)
    served = fmt.served_inputs(inputs / scales, rounded).double()
    exact = inputs.double() @ weight.double().T
    return float((served @ rounded.dequantize().double().T - exact).square().sum() / exact.square().sum())


@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_no_scales(layer: Layers, seed: int) -> None:
    weight, inputs = layer(seed, tokens=300)
    absmax = inputs.abs().amax(0)
    choice = search_scales(weight, CtInt8(), absmax, inputs, 10, untied)
    assert choice.loss <= choice.identity_loss
    assert choice.loss == pytest.approx(relative_loss(weight, choice.scales, CtInt8(), inputs), rel=1e-3)
    identity = torch.ones(weight.shape[1])
    assert choice.identity_loss == pytest.approx(relative_loss(weight, identity, CtInt8(), inputs), rel=1e-3)


def test_outliers_move_into_the_weights(layer: Layers) -> None:
    weight, inputs = layer(3, tokens=300)
    inputs[:, 11] *= 200
    inputs[:, 70] *= 100
    choice = search_scales(weight, CtInt8(), inputs.abs().amax(0), inputs, 20, untied)
    assert choice.loss < 0.1 * choice.identity_loss
    assert set(choice.scales.topk(2).indices.tolist()) == {11, 70}


def test_strength_0_evens_out_the_weights_and_1_the_inputs(layer: Layers) -> None:
    weight, inputs = layer(4, tokens=300)
    absmax = inputs.abs().amax(0)
    first, *_, last = candidates(weight, absmax, 10)
    columns = (weight * first).abs().amax(0)
    assert torch.allclose(columns, columns.mean().expand_as(columns), rtol=1e-4)
    smoothed = absmax / last
    assert torch.allclose(smoothed, smoothed.mean().expand_as(smoothed), rtol=1e-4)


def test_columns_without_inputs_or_weights(layer: Layers) -> None:
    weight, inputs = layer(5, tokens=300)
    inputs[:, 3] = 0
    weight[:, 9] = 0
    choice = search_scales(weight, CtInt8(), inputs.abs().amax(0), inputs, 4, untied)
    assert bool(torch.isfinite(choice.scales).all())
    assert bool((choice.scales > 0).all())


def test_scales_are_equal_where_heads_share_a_value(layer: Layers) -> None:
    weight, inputs = layer(6, tokens=300)
    inputs[:, 5] *= 100
    choice = search_scales(weight, CtInt8(), inputs.abs().amax(0), inputs, 10, tied_heads(64, 256, 32))
    heads = choice.scales.view(2, 4, 32)
    assert torch.equal(heads, heads[:, :1].expand_as(heads))
    assert choice.loss < choice.identity_loss


@pytest.mark.parametrize("factor", [1e30, float("inf"), float("nan")])
def test_overflow_is_an_error(layer: Layers, factor: float) -> None:
    weight, inputs = layer(7, tokens=300)
    inputs[:, 3] *= factor
    with pytest.raises(InputError, match="not finite"):
        search_scales(weight, CtInt8(), inputs.abs().amax(0), inputs, 4, untied)


def test_rounding_itself_is_plain(layer: Layers) -> None:
    weight, inputs = layer(8, tokens=300)
    seen = InputStatistics(256, hessian=False)
    seen.add(inputs)
    rounded = SmoothQuantMethod().round(weight, CtInt8(), seen)
    assert torch.equal(rounded.quantized.dequantize(), CtInt8().quantize(weight).dequantize())
    assert rounded.loss is None


def test_only_integer_grids_can_be_divided_afterwards(layer: Layers) -> None:
    """The value layer is rounded before its outputs take the scales of the next; other codes cannot follow."""
    weight, inputs = layer(9, tokens=300)
    seen = InputStatistics(256, hessian=False)
    seen.add(inputs)
    with pytest.raises(InputError, match="'smoothquant' needs a format with an integer grid, not 'llm-int8'"):
        SmoothQuantMethod().choose_scales(weight, LlmInt8(), seen, untied)
