"""The Hopper matmul: Gluon, which Triton's interpreter does not know, so on a GPU of that kind only."""

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Awq, CtPacked, Format, Fp4, Gptq, Nf4
from quantkit.kernels.linear import hopper, packed
from quantkit.kernels.linear.hopper import HopperConfig
from quantkit.kernels.reference import linear as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
FORMATS: dict[str, Format] = {
    "w4g128": Gptq(bits=4, group_size=128),
    "w4g128-asym": Gptq(bits=4, group_size=128, sym=False),
    "w4-row": CtPacked(bits=4, group_size=-1),
    "awq-w4g64": Awq(bits=4, group_size=64, sym=False),
    "w4g32-asym": CtPacked(bits=4, group_size=32, sym=False),
    "w8g128": CtPacked(bits=8, group_size=128),
    "w8-row-asym": CtPacked(bits=8, group_size=-1, sym=False),
    "w3g64-asym": CtPacked(bits=3, group_size=64, sym=False),
    "w2g32-asym": CtPacked(bits=2, group_size=32, sym=False),
    "nf4": Nf4(),
    "fp4-plain": Fp4(double_quant=False),
}


def assert_right(fmt: Format, outputs: int, x: Tensor, config: HopperConfig, *, bias: bool = False) -> None:
    torch.manual_seed(0)
    quantized = fmt.quantize((0.02 * torch.randn(outputs, x.shape[1], device="cuda") + 0.005).to(torch.bfloat16))
    addend = torch.randn(outputs, device="cuda").to(x.dtype) if bias else None
    out = torch.full((x.shape[0], outputs), float("nan"), device="cuda", dtype=x.dtype)
    weight = packed.pack(quantized)
    assert hopper.matmul(x, weight, config, bias=addend, out=out) is out
    exact = reference.exact(x, fmt, quantized, addend)
    error = relative_error(out, exact)
    assert error < LARGEST_ERROR[str(x.dtype)[6:]]
    assert error < 2 * relative_error(reference.linear(x, fmt, quantized, addend), exact)
    assert torch.equal(hopper.matmul(x, weight, config, bias=addend), out)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_of_weight(name: str) -> None:
    inputs = 384 if "128" in name else 448
    x = torch.randn(300, inputs, device="cuda", dtype=torch.bfloat16)
    assert_right(FORMATS[name], 136, x, HopperConfig(), bias=name in ("w4g128", "nf4"))


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129])
def test_any_number_of_tokens(tokens: int) -> None:
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.float16)
    if tokens:
        assert_right(FORMATS["w4g128"], 200, x, HopperConfig(128, 4))
    else:
        weight = packed.pack(FORMATS["w4g128"].quantize(torch.randn(8, 256, device="cuda")))
        assert hopper.matmul(x, weight, HopperConfig(128, 4)).shape == (0, 8)


@needs_hopper
@pytest.mark.gpu
def test_rows_that_the_copy_engine_cannot_take() -> None:
    """A stride that 16 bytes do not divide: copied first."""
    x = torch.randn(5, 131, device="cuda", dtype=torch.bfloat16)[:, 1:129]
    assert_right(FORMATS["w4g128"], 64, x, HopperConfig(128, 4))


def test_elsewhere_it_is_refused() -> None:
    weight = packed.pack(FORMATS["w4g128"].quantize(torch.randn(8, 128)))
    x = torch.randn(2, 128, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"compute capability 9\.0"):
        hopper.matmul(x, weight, HopperConfig())
    with pytest.raises(InputError, match="shape"):
        hopper.matmul(x[0], weight, HopperConfig())
