"""Packed codes times tokens in fixed point: exact products, odd shapes, zero points, act-order, what is not finite."""

import dataclasses

import pytest
import torch

from pairwise import cover
from quantkit.errors import InputError
from quantkit.formats import CtPacked, Format, Gptq, Nf4
from quantkit.kernels.linear.weight_only import fixed_point
from quantkit.kernels.linear.weight_only.fixed_point import FixedPointConfig, matmul
from quantkit.kernels.linear.weight_only.weight import PackedWeight, lay_out
from quantkit.kernels.reference import fixed_point as reference
from quantkit.kernels.reference.compare import relative_error
from signed_scales import with_signs

pytestmark = pytest.mark.kernel

FORMATS: dict[str, Format] = {
    "w4g128": Gptq(bits=4, group_size=128),
    "w4g128-asym": CtPacked(bits=4, group_size=128, sym=False, dtype="float32"),
    "w4g256-asym": CtPacked(bits=4, group_size=256, sym=False),
    "w4-row": Gptq(bits=4, group_size=-1),
    "w8g128": CtPacked(bits=8, group_size=128),
    "w8-row-asym": CtPacked(bits=8, group_size=-1, sym=False),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}  # of results, relative to the largest
QUICK = FixedPointConfig(32, 8, 2, 3, splits=2)


def make(fmt: Format, outputs: int, device: str) -> tuple[torch.Tensor, PackedWeight]:
    """A weight as it is decoded, and laid out; rows that are one group do not end with a chunk."""
    torch.manual_seed(outputs)
    inputs = {-1: 200, 256: 512}.get(getattr(fmt, "group_size", 0), 384)
    quantized = with_signs(fmt.quantize((0.02 * torch.randn(outputs, inputs) + 0.005).to(device)))
    return quantized.dequantize(), lay_out(quantized)


def tokens_of(count: int, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """With an outlier, and a chunk of zeros."""
    x = torch.randn(count, weight.inputs, device=weight.device)
    x[0, 3] = 300
    x[-1, :128] = 0
    return x.to(dtype)


@pytest.mark.parametrize(("name", "dtype", "tokens", "config"), cover(FORMATS, DTYPES, (1, 3, 11), fixed_point.TRIED))
def test_every_kind_of_weight(name: str, dtype: str, tokens: int, config: FixedPointConfig, device: str) -> None:
    decoded, weight = make(FORMATS[name], 72, device)
    x = tokens_of(tokens, weight, DTYPES[dtype])
    bias = torch.randn(72, device=device).to(x.dtype)
    out = torch.full((tokens, 72), float("nan"), dtype=x.dtype, device=device)
    assert matmul(x, weight, dataclasses.replace(config, splits=2), bias=bias, out=out) is out
    exact = reference.linear(x, decoded, bias)
    assert float((out.double() - exact).abs().max() / exact.abs().max()) < ROUNDING[dtype]


@pytest.mark.parametrize("name", ["w4g128-asym", "w8g128"])
def test_fixed_point_is_finer_than_bfloat16(name: str, device: str) -> None:
    """The distance to products with the inputs as they are in float32 is that of results in float16 alone."""
    decoded, weight = make(FORMATS[name], 64, device)
    x = torch.randn(4, weight.inputs, device=device, dtype=torch.float16)
    exact = x.double() @ decoded.double().T
    rounded = relative_error(x.to(torch.bfloat16).double() @ decoded.double().T, exact)
    assert relative_error(reference.linear(x, decoded), exact) < rounded / 20
    assert relative_error(matmul(x, weight, QUICK), exact) < rounded / 2


def test_tokens_are_what_the_reference_makes_of_them(device: str) -> None:
    """Both bytes and their sum, at the places that the product reads; what is not a whole chunk is 0."""
    for name in ("w4-row", "w8-row-asym"):
        _, weight = make(FORMATS[name], 16, device)
        x = tokens_of(3, weight, torch.bfloat16)
        fixed = fixed_point.to_fixed_point(x, weight)
        whole = 256 * fixed.codes[:, :, 0].int() + fixed.codes[:, :, 1].int()
        assert torch.equal(whole.sum(-1), fixed.sums.long())
        found = (whole * fixed.scales.double()[:, :, None]).flatten(1)
        expected = torch.nn.functional.pad(reference.rounded(x), (0, -weight.inputs % 128))
        in_chunk = expected.unflatten(1, (-1, 128)).abs().sort(-1).values
        assert torch.allclose(found.unflatten(1, (-1, 128)).abs().sort(-1).values, in_chunk, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["w4g128", "w8g128"])
def test_every_input_meets_its_own_weight(name: str, device: str) -> None:
    decoded, weight = make(FORMATS[name], 16, device)
    x = torch.eye(weight.inputs, device=device, dtype=torch.float16)
    y = matmul(x, weight, FixedPointConfig(32, 64, 2, 3))
    assert torch.allclose(y.T.float(), decoded.float(), rtol=2**-10, atol=1e-6)


def test_columns_in_another_order(device: str) -> None:
    _, weight = make(FORMATS["w4g128"], 40, device)
    order = torch.randperm(weight.inputs, device=device).to(torch.int32)
    x = tokens_of(2, weight, torch.bfloat16)
    y = matmul(x, dataclasses.replace(weight, order=order), QUICK)
    assert torch.equal(y, matmul(x[:, order.long()].contiguous(), weight, QUICK))
    assert torch.isfinite(y).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(value: float, device: str) -> None:
    _, weight = make(FORMATS["w4g128"], 16, device)
    x = tokens_of(2, weight, torch.bfloat16)
    x[1, 200] = value
    y = matmul(x, weight, QUICK)
    assert torch.isfinite(y[0]).all()
    assert not torch.isfinite(y[1]).any()


def test_no_tokens(device: str) -> None:
    _, weight = make(FORMATS["w4g128"], 16, device)
    assert matmul(torch.empty(0, weight.inputs, device=device, dtype=torch.float16), weight, QUICK).shape == (0, 16)


@pytest.mark.parametrize("fmt", [Nf4(), Gptq(bits=4, group_size=64), Gptq(bits=3, group_size=128)])
def test_other_weights_are_refused(fmt: Format, device: str) -> None:
    weight = lay_out(fmt.quantize(torch.randn(16, 128).to(torch.bfloat16).to(device)))
    assert not fixed_point.supports(weight)
    with pytest.raises(InputError, match="it takes integers of 4 or 8 bits in groups of 128 or more"):
        matmul(torch.zeros(1, 128, device=device, dtype=torch.bfloat16), weight, QUICK)
