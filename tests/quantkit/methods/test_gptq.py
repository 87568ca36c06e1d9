"""GPTQ against independent arithmetic."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from long_cases import one_of_each
from pairwise import cover
from quantkit.errors import CannotHold, InputError
from quantkit.formats import CtPacked, Gptq, IntegerFormat, IntegerWeight, Nf4
from quantkit.methods.gptq import GptqMethod, inverse_factor, quantize_layer
from quantkit.methods.grid import search_grid
from quantkit.methods.losses import output_loss
from quantkit.methods.statistics import InputStatistics

Layers = Callable[..., tuple[Tensor, Tensor]]

FORMATS = [
    Gptq(group_size=32),
    Gptq(bits=3, group_size=64),
    Gptq(bits=8, group_size=128),
    Gptq(sym=False, group_size=64),
    Gptq(bits=2, sym=False, group_size=32, version=2),
    CtPacked(bits=2, group_size=-1),
    CtPacked(bits=3, sym=False, group_size=128),
    CtPacked(bits=8, sym=False, group_size=-1),
]
ORDERS = ["none", "static", "desc_act"]


def in_words(value: IntegerFormat | str) -> str:
    return value if isinstance(value, str) else f"{value.name} {value.describe()}"


every_format = pytest.mark.parametrize("fmt", FORMATS, ids=in_words)
every_order = pytest.mark.parametrize("order", ORDERS)


def row_losses(weight: Tensor, rounded: Tensor, hessian: Tensor) -> Tensor:
    """What `output_loss` should give, in float64."""
    error = weight.double() - rounded.double()
    return torch.einsum("oi,ij,oj->o", error, hessian.double(), error)


def grid_of(weight: Tensor, hessian: Tensor, fmt: IntegerFormat, order: str, kind: str) -> IntegerWeight:
    """The grid that GPTQ should round to; under desc_act the groups are cut from the sorted columns."""
    columns = torch.arange(weight.shape[1])
    if order == "desc_act":
        columns = torch.argsort(hessian.diagonal(), descending=True)
    sorted_weight, sorted_hessian = weight[:, columns], hessian[columns][:, columns]
    grid = search_grid(sorted_weight, fmt, sorted_hessian) if kind == "search" else fmt.quantize(sorted_weight)
    group_of = torch.empty_like(columns)
    group_of[columns] = torch.arange(len(columns)) // fmt.group_width(len(columns))
    return replace(grid, group_of=group_of)


def textbook(weight: Tensor, hessian: Tensor, grid: IntegerWeight, sort: bool, damping: float) -> Tensor:
    """Optimal brain quantization in a fixed order, one column at a time, in float64, with an explicit inverse."""
    order = torch.argsort(hessian.diagonal(), descending=True) if sort else torch.arange(weight.shape[1])
    work = weight.double()[:, order]
    damped = hessian.double()[order][:, order]
    damped += damping * damped.diagonal().mean() * torch.eye(len(damped), dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    group = grid.input_groups()[order]
    result = torch.empty_like(work)
    for i in range(work.shape[1]):
        scale, zero = grid.scales.double()[:, group[i]], grid.zeros.double()[:, group[i]]
        code = (torch.round(work[:, i] / scale) + zero).clamp(0, 2**grid.bits - 1)
        result[:, i] = scale * (code - zero)
        error = (work[:, i] - result[:, i]) / inverse[i, i]
        work -= error[:, None] * inverse[i]
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, i] = 1.0  # this column is done; keep the division defined
    final = torch.empty_like(result)
    final[:, order] = result
    return final


@pytest.mark.parametrize(
    ("fmt", "order", "grid"), one_of_each(cover(FORMATS, ORDERS, ["minmax", "search"])), ids=in_words
)
def test_equals_the_textbook(layer: Layers, fmt: IntegerFormat, order: str, grid: str) -> None:
    """Float32 may break a tie the other way, and the columns behind it follow; the loss stays what it is."""
    weight, inputs = layer(ORDERS.index(order))
    hessian = inputs.T @ inputs
    ours = quantize_layer(weight, fmt, hessian, GptqMethod(order=order, grid=grid))
    target = grid_of(weight, hessian, fmt, order, grid)
    expected = textbook(weight, hessian, target, order != "none", ours.damping)
    steps = (ours.quantized.dequantize() - expected).abs() / target.scales.float()[:, target.input_groups()]
    assert float((steps < 0.01).float().mean()) > 0.98
    assert torch.allclose(ours.loss.double(), row_losses(weight, expected, hessian), rtol=0.1)
    assert float(ours.loss.sum()) == pytest.approx(float(row_losses(weight, expected, hessian).sum()), rel=0.01)


@every_format
@every_order
def test_identity_hessian_is_plain_rounding(layer: Layers, fmt: IntegerFormat, order: str) -> None:
    weight, _ = layer(3)
    result = quantize_layer(weight, fmt, torch.eye(weight.shape[1]), GptqMethod(order=order, grid="minmax"))
    assert torch.equal(result.quantized.codes, fmt.quantize(weight).codes)
    assert torch.equal(result.quantized.dequantize(), fmt.quantize(weight).dequantize())


@every_format
@pytest.mark.parametrize("grid", ["minmax", "search"])
@pytest.mark.parametrize("order", ["none", "static"])
def test_no_row_is_worse_than_plainly_rounded(layer: Layers, fmt: IntegerFormat, grid: str, order: str) -> None:
    for seed in range(3):
        weight, inputs = layer(seed, inputs=128)
        hessian = inputs.T @ inputs
        result = quantize_layer(weight, fmt, hessian, GptqMethod(order=order, grid=grid))
        ours = row_losses(weight, result.quantized.dequantize(), hessian)
        plain = row_losses(weight, fmt.quantize(weight).dequantize(), hessian)
        assert bool((ours <= plain * 1.001).all())
        assert float(ours.sum()) < 0.8 * float(plain.sum())  # on correlated inputs clearly better
        assert torch.allclose(result.loss.double(), ours, rtol=1e-2)
        assert torch.allclose(result.rounding_loss.double(), plain, rtol=1e-2)


@every_order
def test_rows_that_plain_rounding_serves_better_are_plainly_rounded(order: str) -> None:
    """Inputs that hardly correlate: compensation gains little, and does harm in some rows. One group a row."""
    generator = torch.Generator().manual_seed(7)
    weight, inputs = torch.randn(48, 64, generator=generator), torch.randn(8192, 64, generator=generator)
    fmt = CtPacked(group_size=-1)
    result = quantize_layer(weight, fmt, inputs.T @ inputs, GptqMethod(order=order, grid="minmax"))
    assert bool((result.loss <= result.rounding_loss).all())
    plain = (result.quantized.codes == fmt.quantize(weight).codes).all(1)
    assert 0 < int(plain.sum()) < len(weight)


@every_format
@pytest.mark.parametrize("grid", ["minmax", "search"])
def test_scattered_groups_lose_less_than_plain_rounding(layer: Layers, fmt: IntegerFormat, grid: str) -> None:
    weight, inputs = layer(2)
    result = quantize_layer(weight, fmt, inputs.T @ inputs, GptqMethod(order="desc_act", grid=grid))
    assert float(result.loss.sum()) < 0.8 * float(result.rounding_loss.sum())


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if isinstance(fmt, Gptq)], ids=lambda fmt: fmt.describe())
def test_scattered_groups_are_stored_and_read_back(layer: Layers, fmt: Gptq) -> None:
    weight, inputs = layer(4)
    result = quantize_layer(weight, fmt, inputs.T @ inputs, GptqMethod(order="desc_act"))
    stored = replace(fmt, act_order=True)
    assert torch.equal(stored.decode(stored.pack(result.quantized)), result.quantized.dequantize())
    with pytest.raises(CannotHold, match="act_order"):
        fmt.pack(result.quantized)


def test_dead_columns(layer: Layers) -> None:
    weight, inputs = layer(4)
    inputs[:, 7] = inputs[:, 100:110] = 0
    for order in ORDERS:
        result = quantize_layer(weight, Gptq(group_size=64), inputs.T @ inputs, GptqMethod(order=order))
        assert float(result.loss.sum()) < 0.8 * float(result.rounding_loss.sum())
        decoded, dead = result.quantized.dequantize(), [7, *range(100, 110)]
        assert bool(torch.isfinite(decoded).all())
        step = result.quantized.scales.float().abs()[:, result.quantized.input_groups()][:, dead]
        assert bool(((decoded - weight)[:, dead].abs() <= 8 * step).all())
        inside = weight[:, dead].abs() < 7 * step  # not cut off: at its nearest code, since other text may need it
        assert bool(((decoded - weight)[:, dead].abs() <= 0.501 * step)[inside].all())
        assert bool(decoded[:, dead].any())


def test_layers_that_calibration_never_reached_are_plainly_rounded_and_say_so(layer: Layers) -> None:
    weight, _ = layer(5)
    unseen = InputStatistics(weight.shape[1])
    unseen.add(torch.zeros(10, weight.shape[1]))
    fmt = Gptq(group_size=64)
    rounded = GptqMethod().round(weight, fmt, unseen)
    assert torch.equal(rounded.quantized.dequantize(), fmt.quantize(weight).dequantize())
    assert "never reached" in str((rounded.notes or {})["warning"])


def bent_identity() -> Tensor:
    """One eigenvalue of -0.05, as rounding may leave it."""
    direction = torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(1)), dim=0)
    return torch.eye(64) - 1.05 * torch.outer(direction, direction)


def test_damping_grows_until_the_factor_exists() -> None:
    bent = bent_identity()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    damped = (bent + 0.1 * bent.diagonal().mean() * torch.eye(64))[order][:, order]
    factor, damping = inverse_factor(bent, order, 0.01)
    assert damping == pytest.approx(0.1)
    assert torch.equal(factor, factor.triu())
    assert torch.allclose(factor.T @ factor @ damped, torch.eye(64), atol=1e-4)
    with pytest.raises(InputError, match="not finite"):
        inverse_factor(torch.full((4, 4), float("nan")), torch.arange(4), 0.01)


def test_the_log_says_why_damping_grew() -> None:
    statistics = InputStatistics(64)
    fmt = CtPacked(group_size=-1)
    statistics.hessian = bent_identity()
    notes = GptqMethod().round(torch.randn(8, 64), fmt, statistics).notes or {}
    assert notes["damping"] == pytest.approx(0.1)
    assert "Cholesky" in str(notes["damping_reason"])
    statistics.hessian = torch.eye(64)
    assert GptqMethod().round(torch.randn(8, 64), fmt, statistics).notes == {"damping": 0.01}


def test_output_loss_is_the_squared_error_of_the_outputs(layer: Layers) -> None:
    weight, inputs = layer(6)
    rounded = Nf4().quantize(weight)
    expected = (inputs @ (weight - rounded.dequantize()).T).square().sum(0)
    assert torch.allclose(output_loss(weight, rounded, inputs.T @ inputs), expected, rtol=1e-3)


def test_tables_are_refused() -> None:
    with pytest.raises(InputError, match="integer grid"):
        quantize_layer(torch.randn(8, 64), Nf4(), torch.eye(64))
