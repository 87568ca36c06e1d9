"""Weight-only matmuls against float64: every kind of code, odd shapes, every group size, act-order, zero points."""

import dataclasses

import pytest
import torch

from long_cases import one_of_each
from pairwise import cover
from quantkit.errors import InputError
from quantkit.formats import Awq, CtMxfp4, CtNvfp4, CtPacked, Format, Fp4, Gptq, Nf4, QuantizedWeight
from quantkit.kernels.linear.weight_only import dequantize as decode_once
from quantkit.kernels.linear.weight_only.dequantize import dequantize
from quantkit.kernels.linear.weight_only.skinny import SkinnyConfig, matmul
from quantkit.kernels.linear.weight_only.weight import PackedWeight, lay_out, why_not
from quantkit.kernels.reference import linear as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error
from signed_scales import with_signs

pytestmark = pytest.mark.kernel

FORMATS: dict[str, Format] = {
    "gptq-w4g128": Gptq(bits=4, group_size=128),
    "gptq-w4g128-asym": Gptq(bits=4, group_size=128, sym=False),
    "gptq-w4-row": Gptq(bits=4, group_size=-1),
    "awq-w4g64": Awq(bits=4, group_size=64, sym=False),
    "w4g32": CtPacked(bits=4, group_size=32),
    "w4g32-asym": CtPacked(bits=4, group_size=32, sym=False),
    "w4g16-asym": CtPacked(bits=4, group_size=16, sym=False),
    "w4-row-asym": CtPacked(bits=4, group_size=-1, sym=False),
    "w8g128": CtPacked(bits=8, group_size=128),
    "w8-row-asym": CtPacked(bits=8, group_size=-1, sym=False),
    "w8g32-asym": CtPacked(bits=8, group_size=32, sym=False),
    "w3g128": Gptq(bits=3, group_size=128),
    "w3g64-asym": CtPacked(bits=3, group_size=64, sym=False),
    "w2g32-asym": CtPacked(bits=2, group_size=32, sym=False),
    "float32-scales": CtPacked(bits=4, group_size=64, sym=False, dtype="float32"),
    "nf4": Nf4(),
    "nf4-plain": Nf4(double_quant=False, block=128),
    "nf4-block256": Nf4(block=256),
    "fp4": Fp4(double_quant=True),
    "mxfp4": CtMxfp4(),
    "nvfp4": CtNvfp4(),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def make(fmt: Format, outputs: int, inputs: int, device: str, seed: int = 0) -> tuple[QuantizedWeight, PackedWeight]:
    torch.manual_seed(seed)
    weight = (0.02 * torch.randn(outputs, inputs) + 0.005).to(torch.bfloat16).to(device)
    quantized = with_signs(fmt.quantize(weight))
    return quantized, lay_out(quantized)


def inputs_of(fmt: Format) -> int:
    """Not a multiple of 128 where the group size allows it."""
    group = getattr(fmt, "group_size", 0) or getattr(fmt, "block", 0)
    return {128: 384, 256: 512}.get(group, 448)


def assert_right(
    y: torch.Tensor, x: torch.Tensor, fmt: Format, weight: QuantizedWeight, bias: torch.Tensor | None
) -> None:
    exact = reference.exact(x, fmt, weight, bias)
    error = relative_error(y, exact)
    assert error < LARGEST_ERROR[str(x.dtype)[6:]]
    assert error < 2 * relative_error(reference.linear(x, fmt, weight, bias), exact)


@pytest.mark.parametrize(("name", "dtype", "half"), one_of_each(cover(FORMATS, DTYPES, (0, 1))))
def test_every_kind_of_weight(name: str, dtype: str, half: int, device: str) -> None:
    """With every second way to launch: one dtype has one half of them, the other dtype the other."""
    fmt = FORMATS[name]
    quantized, weight = make(fmt, 72, inputs_of(fmt), device)
    x = torch.randn(3, quantized.shape[1], device=device).to(DTYPES[dtype])
    bias = torch.randn(72, device=device).to(DTYPES[dtype])
    configs = [SkinnyConfig(32, 8, 2, 3, splits=2), SkinnyConfig(64, 16, 4, 3, splits=1)]
    if weight.table is not None:  # more shared memory than Triton knows about, and less than 48 KB
        configs += [SkinnyConfig(128, 8, 8, 4, splits=2, copies=32), SkinnyConfig(64, 16, 4, 2, copies=8)]
    for config in configs[half::2]:
        out = torch.full((3, 72), float("nan"), dtype=x.dtype, device=device)
        assert matmul(x, weight, config, bias=bias, out=out) is out
        assert_right(out, x, fmt, quantized, bias)
    decoded = dequantize(weight, x.dtype)
    assert relative_error(decoded, quantized.dequantize()) < LARGEST_ERROR[dtype]
    if weight.table is None:
        assert torch.equal(decoded, quantized.dequantize(x.dtype))


@pytest.mark.parametrize("name", ["gptq-w4g128", "awq-w4g64", "w8g32-asym", "nf4", "mxfp4", "nvfp4"])
def test_scales_before_the_product(name: str, device: str) -> None:
    fmt = FORMATS[name]
    quantized, weight = make(fmt, 64, inputs_of(fmt), device)
    x = torch.randn(5, quantized.shape[1], device=device, dtype=torch.float16)
    y = matmul(x, weight, SkinnyConfig(64, 16, 4, 2, scale_first=True))
    assert_right(y, x, fmt, quantized, None)


@pytest.mark.parametrize("name", ["gptq-w4g128-asym", "awq-w4g64", "w4g32", "gptq-w4-row"])
def test_several_sums(name: str, device: str) -> None:
    fmt = FORMATS[name]
    quantized, weight = make(fmt, 40, inputs_of(fmt), device)
    x = torch.randn(2, quantized.shape[1], device=device, dtype=torch.float16)
    assert_right(matmul(x, weight, SkinnyConfig(32, 8, 2, 3, splits=2, sums=2)), x, fmt, quantized, None)


@pytest.mark.parametrize("tokens", [1, 8, 9, 17, 40])
def test_any_number_of_tokens_and_outputs(tokens: int, device: str) -> None:
    fmt = FORMATS["gptq-w4g128"]
    quantized, weight = make(fmt, 130, 256, device)
    x = torch.randn(tokens, 256, device=device, dtype=torch.bfloat16)
    assert_right(matmul(x, weight, SkinnyConfig(64, 16, 4, 3, splits=2)), x, fmt, quantized, None)
    assert_right(decode_once.matmul(x, weight, bias=x.new_ones(130)), x, fmt, quantized, x.new_ones(130))


def test_no_tokens(device: str) -> None:
    _, weight = make(FORMATS["gptq-w4g128"], 16, 128, device)
    x = torch.empty(0, 128, device=device, dtype=torch.bfloat16)
    assert matmul(x, weight, SkinnyConfig()).shape == (0, 16)
    assert decode_once.matmul(x, weight).shape == (0, 16)


def test_rows_with_a_stride(device: str) -> None:
    fmt = FORMATS["gptq-w4g128"]
    quantized, weight = make(fmt, 33, 128, device)
    x = torch.randn(4, 300, device=device, dtype=torch.bfloat16)[:, 100:228]
    out = torch.zeros(4, 50, device=device, dtype=torch.bfloat16)
    matmul(x, weight, SkinnyConfig(32, 8, 2, 2), out=out[:, :33])
    assert_right(out[:, :33], x, fmt, quantized, None)
    assert bool((out[:, 33:] == 0).all())


def test_act_order(device: str) -> None:
    """Groups scattered over the inputs: the activations are permuted, once."""
    quantized, _ = make(FORMATS["gptq-w4g128-asym"], 48, 256, device)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3)).to(device)
    scattered = dataclasses.replace(quantized, group_of=(order // 128).to(torch.int32))
    weight = lay_out(scattered)
    assert weight.order is not None
    fmt = FORMATS["gptq-w4g128-asym"]
    x = torch.randn(2, 256, device=device, dtype=torch.float16)
    assert_right(matmul(x, weight, SkinnyConfig(splits=2)), x, fmt, scattered, None)
    assert_right(decode_once.matmul(x, weight), x, fmt, scattered, None)


def test_the_same_every_time_and_nothing_left_behind(device: str) -> None:
    _, weight = make(FORMATS["nf4"], 64, 1024, device)
    x = torch.randn(2, 1024, device=device, dtype=torch.bfloat16)
    config = SkinnyConfig(32, 8, 2, 3, splits=8)
    first = matmul(x, weight, config)
    for _ in range(3 if device == "cuda" else 1):
        assert torch.equal(matmul(x, weight, config), first)
    assert int(weight.tickets.abs().sum()) == 0


def test_groups_that_no_kernel_takes() -> None:
    weight = CtPacked(bits=4, group_size=96).quantize(torch.randn(8, 192))
    why = why_not(weight)
    assert why is not None
    assert "96" in why
    with pytest.raises(InputError, match="groups of 96"):
        lay_out(weight)
    across_rows = Nf4(block=64).quantize(torch.randn(8, 96))
    assert "do not divide" in (why_not(across_rows) or "")
    unequal = dataclasses.replace(
        CtPacked(bits=4, group_size=32).quantize(torch.randn(4, 64)), group_of=torch.tensor([0] * 20 + [1] * 44)
    )
    assert "unequal" in (why_not(unequal) or "")


WRONG = {
    "a vector": (lambda x: x[0], "shape"),
    "too few inputs": (lambda x: x[:, :100], "must be [any, 128]"),
    "float32": (lambda x: x.float(), "bfloat16, float16"),
    "strided": (lambda x: x.repeat_interleave(2, 1)[:, ::2], "contiguous"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused_before_any_launch(name: str, device: str) -> None:
    _, weight = make(FORMATS["gptq-w4g128"], 16, 128, device)
    spoil, words = WRONG[name]
    x = spoil(torch.randn(4, 128, device=device, dtype=torch.bfloat16))
    for call in (lambda: matmul(x, weight, SkinnyConfig()), lambda: decode_once.matmul(x, weight)):
        with pytest.raises(InputError) as refused:
            call()
        assert words in str(refused.value)


def test_wrong_bias_out_and_device(device: str) -> None:
    _, weight = make(FORMATS["gptq-w4g128"], 16, 128, device)
    x = torch.randn(4, 128, device=device, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="bias has shape"):
        matmul(x, weight, SkinnyConfig(), bias=x.new_zeros(15))
    with pytest.raises(InputError, match="out has shape"):
        matmul(x, weight, SkinnyConfig(), out=x.new_zeros(4, 15))
    with pytest.raises(InputError, match="out is float32"):
        matmul(x, weight, SkinnyConfig(), out=torch.zeros(4, 16, device=device))
    with pytest.raises(InputError, match="one device"):
        matmul(x.to("meta"), weight, SkinnyConfig())
