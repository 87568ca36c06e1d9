"""Coordinate descent over codes: never worse, and at its end no single code could be better."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CtPacked, Gptq, IntegerFormat
from quantkit.methods import descent
from quantkit.methods.descent import descend
from quantkit.methods.gptq import GptqMethod, column_order, quantize_layer

Layers = Callable[..., tuple[Tensor, Tensor]]
FORMATS = [
    CtPacked(bits=2, group_size=64, sym=False),
    CtPacked(bits=3, group_size=-1),
    Gptq(bits=4, group_size=32, sym=False),
]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.name} {fmt.describe()}")


@every_format
@pytest.mark.parametrize("order", ["none", "static", "desc_act"])
def test_no_row_ends_worse_and_the_layer_ends_better(layer: Layers, fmt: IntegerFormat, order: str) -> None:
    weight, inputs = layer(1, inputs=192, outputs=21)
    hessian = inputs.T @ inputs
    plain, swept = (quantize_layer(weight, fmt, hessian, GptqMethod(order=order, sweeps=count)) for count in (0, 2))
    assert bool((swept.loss <= plain.loss).all())
    assert float(swept.loss.sum()) < 0.97 * float(plain.loss.sum())
    error = (inputs @ (swept.quantized.dequantize() - weight).T).square().sum(0)
    assert torch.allclose(swept.loss, error, rtol=1e-2)
    if order != "desc_act":  # rows may be plainly rounded there, on another grid
        same = (swept.quantized.scales == plain.quantized.scales).all(1)
        assert float(same.float().mean()) > 0.9


@every_format
def test_ends_where_no_single_code_could_be_better(
    layer: Layers, fmt: IntegerFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descent, "BLOCK", 7)  # several blocks, of which the last is short
    weight, inputs = layer(2, inputs=64, outputs=5)
    hessian, start = inputs.T @ inputs, fmt.quantize(weight)
    found = descend(weight, start, hessian, column_order(hessian, "static"), sweeps=40)
    assert torch.equal(found.scales, start.scales)
    assert torch.equal(found.zeros, start.zeros)
    error = (weight - found.dequantize()).double()
    uphill = -2 * error @ hessian.double()  # slope of the loss along every value
    steps = found.scales.double()[:, found.input_groups()]
    for codes in (-1, 1):
        change = codes * steps
        loss = uphill * change + change.square() * hessian.double().diagonal()
        allowed = (found.codes.int() + codes >= 0) & (found.codes.int() + codes < 1 << fmt.bits)
        assert float(loss[allowed].min()) > -1e-4 * float((error @ hessian.double() * error).sum())


def test_too_many_sweeps_are_refused() -> None:
    for sweeps in (-1, 101):
        with pytest.raises(InputError, match=f"sweeps is {sweeps}, but must be 0 to 100"):
            GptqMethod(sweeps=sweeps)
