"""AWQ's scale search: never worse than no scales, clearly better where a few input columns matter most."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Awq, CtPacked, Gptq, IntegerFormat, Nf4
from quantkit.methods.awq import COARSE, AwqMethod, candidates, search_scales
from quantkit.methods.gptq import GptqMethod
from quantkit.methods.grid import search_grid
from quantkit.methods.losses import output_energy, output_loss
from quantkit.methods.method import LARGEST_SCALE, Method
from quantkit.methods.statistics import InputStatistics
from quantkit.passes.folding import tied_heads

Layers = Callable[..., tuple[Tensor, Tensor]]

FORMATS = [
    Awq(group_size=32),
    Awq(group_size=128),
    CtPacked(bits=3, group_size=64, sym=False),
    Gptq(bits=2, group_size=-1),
    Gptq(bits=8, group_size=128),
]

every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.name} {fmt.describe()}")


def untied(scales: Tensor) -> Tensor:
    return scales


def salient(inputs: Tensor) -> Tensor:
    """A few columns far larger than the others, as in trained models."""
    inputs = inputs.clone()
    inputs[:, ::37] *= 60
    return inputs


def relative_loss(weight: Tensor, scales: Tensor, fmt: IntegerFormat, inputs: Tensor) -> float:
    """Squared error of the outputs, relative to their square, as a layer with divided inputs would have it."""
    rounded = fmt.quantize(weight * scales).dequantize().double()
    exact = inputs.double() @ weight.double().T
    error = (inputs.double() / scales.double()) @ rounded.T - exact
    return float(error.square().sum() / exact.square().sum())


@every_format
@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_no_scales(layer: Layers, fmt: IntegerFormat, seed: int) -> None:
    weight, inputs = layer(seed)
    choice = search_scales(weight, fmt, inputs.T @ inputs, 10, untied)
    assert choice.loss <= choice.identity_loss
    assert choice.loss == pytest.approx(relative_loss(weight, choice.scales, fmt, inputs), rel=0.02)
    identity = torch.ones(weight.shape[1])
    assert choice.identity_loss == pytest.approx(relative_loss(weight, identity, fmt, inputs), rel=0.02)


@every_format
def test_salient_columns_are_found(layer: Layers, fmt: IntegerFormat) -> None:
    weight, inputs = layer(3)
    inputs = salient(inputs)
    choice = search_scales(weight, fmt, inputs.T @ inputs, 20, untied)
    assert choice.loss < 0.5 * choice.identity_loss
    others = torch.ones(weight.shape[1], dtype=torch.bool)
    others[::37] = False
    assert float(choice.scales[::37].min()) > 2 * float(choice.scales[others].median())


def test_more_points_never_lose(layer: Layers) -> None:
    """The members of a coarse search are among those of a finer one."""
    weight, inputs = layer(4)
    hessian = salient(inputs).T @ salient(inputs)
    losses = [search_scales(weight, Awq(group_size=64), hessian, points, untied).loss for points in (1, 5, 10, 20)]
    assert losses == sorted(losses, reverse=True)


def test_candidates_have_geometric_mean_one_and_fit_16_bits(layer: Layers) -> None:
    weight, inputs = layer(5)
    found = list(candidates(weight, inputs.T @ inputs, 4, 64))
    assert len(found) == 10
    for scales in found:
        assert float(scales.log().mean()) == pytest.approx(0, abs=1e-4)
    inputs[:, 3] *= 1e9
    inputs[:, 9] = 0
    for scales in candidates(weight, inputs.T @ inputs, 4, 64):
        assert 1 / LARGEST_SCALE <= float(scales.min()) <= float(scales.max()) <= LARGEST_SCALE


@pytest.mark.parametrize(("value_heads", "queries"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_scales_are_equal_where_heads_share_a_value(layer: Layers, value_heads: int, queries: int) -> None:
    weight, inputs = layer(6)
    inputs = salient(inputs)
    folded = value_heads * 32
    tie = tied_heads(folded, 256, 32)
    choice = search_scales(weight, Awq(group_size=64), inputs.T @ inputs, 10, tie)
    heads = choice.scales.view(value_heads, queries, 32)
    assert torch.equal(heads, heads[:, :1].expand_as(heads))
    assert choice.loss < choice.identity_loss
    assert float(choice.scales.max() / choice.scales.min()) > 1.5
    assert choice.loss == pytest.approx(relative_loss(weight, choice.scales, Awq(group_size=64), inputs), rel=0.02)


@pytest.mark.parametrize(
    ("method", "searched"),
    [
        (AwqMethod(points=4), True),
        (AwqMethod(points=4, clip=False), False),
        (GptqMethod(scaling="awq"), True),
        (GptqMethod(scaling="awq", grid="minmax"), False),
    ],
    ids=str,
)
def test_candidates_are_judged_by_the_rounding_that_follows(layer: Layers, method: Method, searched: bool) -> None:
    weight, inputs = layer(9)
    inputs, fmt = salient(inputs), CtPacked(bits=3, group_size=64)
    seen = InputStatistics(weight.shape[1])
    seen.add(inputs)
    choice = method.choose_scales(weight, fmt, seen, untied)
    hessian = seen.require_hessian()
    energy = float(output_energy(weight, hessian).sum())
    for scales, found in ((choice.scales, choice.loss), (torch.ones_like(choice.scales), choice.identity_loss)):
        divided = hessian / scales / scales[:, None]
        scaled = weight * scales
        rounded = search_grid(scaled, fmt, divided, COARSE) if searched else fmt.quantize(scaled)
        assert found == pytest.approx(float(output_loss(scaled, rounded, divided).sum()) / energy, rel=0.01)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_overflow_is_an_error(layer: Layers, bad: float) -> None:
    weight, inputs = layer(7)
    hessian = inputs.T @ inputs
    hessian[3] = hessian[:, 3] = bad
    with pytest.raises(InputError, match="not finite"):
        search_scales(weight, Awq(group_size=64), hessian, 4, untied)


def test_layers_that_calibration_never_reached(layer: Layers) -> None:
    weight, _ = layer(8)
    unseen = InputStatistics(weight.shape[1])
    unseen.add(torch.zeros(10, weight.shape[1]))
    choice = AwqMethod(points=4).choose_scales(weight, Awq(), unseen, untied)
    assert choice.loss >= choice.identity_loss  # what tells the pass to leave the layer before alone
    rounded = AwqMethod().round(weight, Awq(), unseen)
    assert torch.equal(rounded.quantized.dequantize(), Awq().quantize(weight).dequantize())
    assert "never reached" in str((rounded.notes or {})["warning"])


@every_format
def test_clipping_is_never_worse_row_by_row(layer: Layers, fmt: IntegerFormat) -> None:
    weight, inputs = layer(9)
    seen = InputStatistics(weight.shape[1])
    seen.add(inputs)
    plain = AwqMethod(clip=False).round(weight, fmt, seen)
    assert torch.equal(plain.quantized.dequantize(), fmt.quantize(weight).dequantize())
    clipped = AwqMethod().round(weight, fmt, seen)
    assert clipped.loss is not None
    assert plain.loss is not None
    assert bool((clipped.loss <= plain.loss).all())
    error = (inputs @ (weight - clipped.quantized.dequantize()).T).square().sum(0)
    assert torch.allclose(clipped.loss, error, rtol=1e-2)
    assert not clipped.notes


@pytest.mark.parametrize("method", [AwqMethod(), GptqMethod(scaling="awq")])
def test_tables_are_refused(method: AwqMethod | GptqMethod) -> None:
    with pytest.raises(InputError, match="'awq' needs a format with an integer grid, not 'nf4'"):
        method.choose_scales(torch.randn(8, 64), Nf4(), InputStatistics(64), untied)
