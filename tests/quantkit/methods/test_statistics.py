"""What calibration remembers of a layer's inputs."""

import pytest
import torch

from quantkit.methods.statistics import SAMPLE, InputStatistics


def test_batches_add_up() -> None:
    inputs = torch.randn(3, 50, 16)
    statistics = InputStatistics(16)
    for part in inputs:
        statistics.add(part)
    flat = inputs.flatten(0, 1)
    assert torch.allclose(statistics.require_hessian(), flat.T @ flat, rtol=1e-4, atol=1e-3)
    assert torch.equal(statistics.absmax, flat.abs().amax(0))
    assert torch.equal(statistics.sample, flat)
    assert statistics.tokens == 150


def test_the_sample_is_the_first_inputs() -> None:
    statistics = InputStatistics(4)
    inputs = torch.randn(3, SAMPLE // 2 + 100, 4)
    for part in inputs:
        statistics.add(part)
    assert torch.equal(statistics.sample, inputs.flatten(0, 1)[:SAMPLE])
    assert statistics.tokens == 3 * (SAMPLE // 2 + 100)


def test_16_bit_inputs_are_summed_in_float32() -> None:
    """In bfloat16 a sum of ones would stop at 256."""
    statistics = InputStatistics(2)
    for _ in range(3):
        statistics.add(torch.ones(1, 1000, 2, dtype=torch.bfloat16))
    assert torch.equal(statistics.require_hessian(), torch.full((2, 2), 3000.0))
    assert statistics.sample.dtype == statistics.absmax.dtype == torch.float32


def test_divided_statistics_are_those_of_divided_inputs() -> None:
    inputs, scales = torch.randn(100, 8), torch.rand(8) + 0.2
    statistics, expected = InputStatistics(8), InputStatistics(8)
    statistics.add(inputs)
    statistics.divide(scales)
    expected.add(inputs / scales)
    assert torch.allclose(statistics.require_hessian(), expected.require_hessian(), rtol=1e-4, atol=1e-3)
    assert torch.allclose(statistics.absmax, expected.absmax)
    assert torch.allclose(statistics.sample, expected.sample)


def test_adding_and_dividing_leave_the_inputs_alone() -> None:
    inputs = torch.randn(100, 8)
    before = inputs.clone()
    statistics = InputStatistics(8)
    statistics.add(inputs)
    statistics.divide(torch.full((8,), 2.0))
    assert torch.equal(inputs, before)


def test_nan_is_not_lost() -> None:
    inputs = torch.ones(2, 10, 3)
    inputs[0, 4, 1] = float("nan")
    statistics = InputStatistics(3)
    for part in inputs:
        statistics.add(part)
    assert bool(statistics.absmax[1].isnan())
    assert bool(statistics.require_hessian()[1, 1].isnan())


def test_without_h() -> None:
    statistics = InputStatistics(8, hessian=False)
    statistics.add(torch.randn(10, 8))
    statistics.divide(torch.full((8,), 2.0))
    assert statistics.hessian is None
    with pytest.raises(AssertionError, match="without H"):
        statistics.require_hessian()
