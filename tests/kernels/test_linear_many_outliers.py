"""LLM.int8 with more outlier columns than are worth gathering: nothing is rounded, and the product has a bound."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.formats import LlmInt8, QuantizedWeight
from quantkit.kernels.linear.eight_bit import many_outliers
from quantkit.kernels.linear.eight_bit import weight as eight_bit
from quantkit.kernels.linear.eight_bit.many_outliers import launch_in_half, most_outliers
from quantkit.kernels.linear.eight_bit.matmul import EightBitConfig, matmul
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.reference import linear as reference
from quantkit.kernels.reference.compare import relative_error

pytestmark = pytest.mark.kernel

FMT = LlmInt8()
LARGEST = {torch.float16: 1e-3, torch.bfloat16: 6e-3}  # errors of rounding y alone; rounding x to bytes makes 1e-2


def with_outliers(count: int, tokens: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """`count` columns with one value of 6 each, the first and the last among them."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(tokens, inputs, generator=generator).clamp(-4, 4)
    columns = torch.linspace(0, inputs - 1, count).round().long()
    x[torch.randint(tokens, (count,), generator=generator), columns] = 6.0
    return x.to(dtype)


def made(outputs: int, inputs: int, device: str) -> tuple[QuantizedWeight, EightBitWeight]:
    generator = torch.Generator().manual_seed(1)
    quantized = FMT.quantize((0.02 * torch.randn(outputs, inputs, generator=generator)).to(device))
    return quantized, eight_bit.lay_out(FMT, quantized)


def check(
    count: int, tokens: int, outputs: int, inputs: int, dtype: torch.dtype, tile: EightBitConfig, device: str
) -> None:
    x = with_outliers(count, tokens, inputs, dtype).to(device)
    quantized, weight = made(outputs, inputs, device)
    bias = torch.randn(outputs, device=device).to(dtype)
    y = torch.full((tokens, outputs), float("nan"), dtype=dtype, device=device)
    assert matmul(x, weight, tile, bias=bias, out=y) is y
    on_cpu, precise = _on_cpu(quantized), (x.double().cpu(), bias.double().cpu())
    if count > most_outliers(inputs):  # nothing is rounded
        expected = precise[0] @ on_cpu.dequantize(torch.float64).mT + precise[1]
    else:
        expected = reference.linear(precise[0], FMT, on_cpu, precise[1])
    assert relative_error(y.cpu(), expected) < LARGEST[dtype]
    if dtype == torch.float16 and most_outliers(inputs) < count < inputs:
        rounded = _rounded(precise[0]) @ on_cpu.dequantize(torch.float64).mT + precise[1]
        assert relative_error(y.cpu(), rounded) > LARGEST[dtype], "columns without outliers were rounded"
    assert int(weight.tickets.abs().sum()) == 0


def _rounded(x: Tensor) -> Tensor:
    """As LLM.int8 without a bound rounds the columns that hold no outlier."""
    ordinary = (x.abs() < FMT.threshold).all(0)
    sizes = (x * ordinary).abs().amax(1, keepdim=True) / 127
    return torch.where(ordinary, (x / sizes).round() * sizes, x)


def _on_cpu(quantized: QuantizedWeight) -> QuantizedWeight:
    parts = {name: part.cpu() for name, part in vars(quantized).items() if isinstance(part, Tensor)}
    return replace(quantized, **parts)  # type: ignore[type-var]


@pytest.mark.parametrize("tokens", [1, 9, 64])
@pytest.mark.parametrize("count", ["bound", "bound + 1", "all"])
def test_few_tokens(count: str, tokens: int, device: str) -> None:
    inputs = 328
    columns = {"bound": 64, "bound + 1": 65, "all": inputs}[count]
    check(columns, tokens, 70, inputs, torch.float16, EightBitConfig(64, 16, 128, 4, 3, splits=2), device)


@pytest.mark.parametrize(
    ("count", "tokens", "outputs", "inputs", "dtype", "splits"),
    [
        (64, 65, 70, 328, torch.float16, 1),
        (65, 65, 70, 328, torch.float16, 2),
        (328, 130, 131, 328, torch.float16, 1),
        (201, 97, 17, 201, torch.bfloat16, 2),
    ],
)
def test_many_tokens(
    count: int, tokens: int, outputs: int, inputs: int, dtype: torch.dtype, splits: int, device: str
) -> None:
    check(count, tokens, outputs, inputs, dtype, EightBitConfig(64, 64, 128, 4, 3, splits=splits), device)


@pytest.mark.parametrize("count", [64, 65])
def test_weights_decoded_once(count: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device != "cuda":  # under the interpreter so many tokens take long
        monkeypatch.setattr(many_outliers, "DECODED_FROM", 66)
    tokens = many_outliers.DECODED_FROM + 3
    check(count, tokens, 140, 200, torch.float16, EightBitConfig(128, 128, 128, 8, 3), device)


def test_the_bound_is_a_share_of_wide_rows() -> None:
    assert [most_outliers(inputs) for inputs in (128, 4096, 14336)] == [64, 256, 896]


def test_nothing_is_written_where_outliers_are_few(device: str) -> None:
    _, weight = made(40, 200, device)
    x = with_outliers(3, 66, 200, torch.float16).to(device)
    listed = torch.zeros(1 + weight.columns, dtype=torch.int32, device=device)
    listed[0] = 64
    y = torch.full((66, 40), 7.0, dtype=torch.float16, device=device)
    launch_in_half(x, listed, weight, None, y)
    assert bool((y == 7).all())
