"""Codes by GPTQ on the grid of GGUF blocks."""

import pytest
import torch
from torch import Tensor

from quantkit.formats import Gguf
from quantkit.formats.gguf import TYPES
from quantkit.methods.block_search import BlockSearchMethod
from quantkit.methods.losses import output_loss
from quantkit.methods.statistics import InputStatistics


def statistics(columns: int = 512) -> InputStatistics:
    """Of inputs that depend on each other, one of them always zero."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(64, columns, generator=generator)
    inputs = torch.randn(1024, 64, generator=generator) @ mixed + torch.randn(1024, columns, generator=generator)
    inputs[:, 5] = 0
    found = InputStatistics(columns)
    found.add(inputs)
    return found


def weights(columns: int = 512) -> Tensor:
    return torch.randn(16, columns, generator=torch.Generator().manual_seed(1)) * 0.05


@pytest.mark.parametrize("kind", TYPES)
def test_no_row_is_worse_and_most_are_much_better(kind: str) -> None:
    weight, inputs, fmt = weights(), statistics(), Gguf(kind)
    rounded = BlockSearchMethod().round(weight, fmt, inputs)
    nearest = BlockSearchMethod(rounding="nearest").round(weight, fmt, inputs)
    assert rounded.loss is not None
    assert nearest.loss is not None
    assert torch.allclose(rounded.loss, output_loss(weight, rounded.quantized, inputs.require_hessian()), rtol=1e-3)
    assert bool((rounded.loss <= nearest.loss).all())
    assert float(rounded.loss.sum()) < 0.6 * float(nearest.loss.sum())
    assert torch.equal(fmt.decode(fmt.pack(rounded.quantized)), rounded.quantized.dequantize())


def test_a_layer_that_calibration_never_reached() -> None:
    rounded = BlockSearchMethod().round(weights(), Gguf("Q4_K"), InputStatistics(512))
    assert rounded.notes is not None
    assert "never reached" in str(rounded.notes["warning"])


def test_scales_of_zero_have_codes_that_mean_zero() -> None:
    weight = weights()
    weight[3] = 0
    assert bool((BlockSearchMethod().round(weight, Gguf("Q4_0"), statistics()).quantized.dequantize()[3] == 0).all())
