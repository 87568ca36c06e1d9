"""Formats on a GPU: parts decode there as they do on the CPU, and encoding there finds the same codes."""

import pytest
import torch

from quantkit.formats import Awq, CtFloat8, CtInt8, CtPacked, Format, Fp4, Gptq, LlmInt8, Nf4

pytestmark = pytest.mark.gpu
FORMATS = [
    *(Gptq(), Gptq(bits=3), Gptq(sym=False), Awq(), CtPacked(), CtPacked(bits=5, sym=False), CtInt8(), LlmInt8()),
    *(CtFloat8(), CtFloat8(strategy="block"), CtFloat8(strategy="tensor"), Nf4(), Nf4(double_quant=False), Fp4()),
]
STATIC = CtFloat8(strategy="tensor", activations="static")


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.name} {fmt.describe()}")
def test_same_on_gpu_and_cpu(fmt: Format) -> None:
    weight = torch.randn(384, 512, generator=torch.Generator().manual_seed(0))
    parts = fmt.encode(weight)
    decoded = fmt.decode({name: part.cuda() for name, part in parts.items()})
    assert decoded.is_cuda
    assert torch.allclose(decoded.cpu(), fmt.decode(parts), rtol=1e-6, atol=0)
    encoded = fmt.decode(fmt.encode(weight.cuda())).cpu()
    # A GPU divides by a constant as it multiplies by its reciprocal, so a scale may round the other way.
    assert float((encoded - fmt.decode(parts)).norm() / weight.norm()) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fmt",
    [LlmInt8(), CtInt8(), CtFloat8(), CtFloat8(strategy="block"), STATIC],
    ids=lambda fmt: f"{fmt.name} {fmt.describe()}",
)
def test_inputs_are_served_alike_on_gpu_and_cpu(fmt: Format, dtype: torch.dtype) -> None:
    """The static scale may have stayed on the CPU."""
    inputs = torch.randn(2, 33, 520, generator=torch.Generator().manual_seed(0)).to(dtype)
    inputs[:, :, 5] *= 10
    quantized = fmt.with_input_scale(fmt.quantize(torch.randn(8, 520)), 20.0)
    served, expected = fmt.served_inputs(inputs.cuda(), quantized), fmt.served_inputs(inputs, quantized)
    assert (served.is_cuda, served.dtype) == (True, dtype)
    # Where a scale rounds the other way, values near a tie do too.
    difference = (served.cpu() - expected).float().norm()
    assert float(difference) < 0.1 * float((expected - inputs).float().norm())
