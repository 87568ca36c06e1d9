"""Matmuls of 8-bit weights: LLM.int8 with its outliers, W8A8, FP8 with scales per token, block and tensor."""

import dataclasses
from itertools import product

import pytest
import torch
from torch import Tensor

from long_cases import others_long
from pairwise import cover
from quantkit.errors import InputError
from quantkit.formats import CtFloat8, CtInt8, CtPacked, Format, LlmInt8, QuantizedWeight
from quantkit.kernels.linear.eight_bit import scaled_mm
from quantkit.kernels.linear.eight_bit import weight as eight_bit
from quantkit.kernels.linear.eight_bit.many_outliers import most_outliers
from quantkit.kernels.linear.eight_bit.matmul import EightBitConfig, matmul
from quantkit.kernels.linear.eight_bit.quantize_rows import quantize_rows
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.reference import linear as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error
from signed_scales import with_signs

pytestmark = pytest.mark.kernel

FORMATS: dict[str, Format] = {
    "llm-int8": LlmInt8(),
    "llm-int8-low": LlmInt8(threshold=1.5),  # a third of the columns are outliers
    "llm-int8-none": LlmInt8(threshold=0.0),
    "w8a8": CtInt8(),
    "fp8": CtFloat8(),
    "fp8-tensor": CtFloat8(strategy="tensor"),
    "fp8-static": CtFloat8(strategy="tensor", activations="static"),
    "fp8-block": CtFloat8(strategy="block"),
    "fp8-exact": CtFloat8(activations="exact"),
    "fp8-block-exact": CtFloat8(strategy="block", activations="exact"),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def make_x(tokens: int, inputs: int, dtype: torch.dtype, device: str, seed: int = 1) -> Tensor:
    """With planted outliers, one of them exactly at LLM.int8's threshold, one in the last column."""
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(seed)).clamp(-4, 4)
    x[0, 5], x[-1, inputs - 1], x[tokens // 2, 17] = 30.0, -7.5, 6.0
    return x.to(dtype).to(device)


def make(fmt: Format, outputs: int, x: Tensor) -> tuple[QuantizedWeight, EightBitWeight]:
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(outputs, x.shape[1])).to(torch.bfloat16).to(x.device)
    quantized = fmt.with_input_scale(with_signs(fmt.quantize(weight)), float(x.abs().max()))
    return quantized, eight_bit.lay_out(fmt, quantized)


def to_cpu(weight: QuantizedWeight) -> QuantizedWeight:
    tensors = {name: value.cpu() for name, value in vars(weight).items() if isinstance(value, Tensor)}
    return dataclasses.replace(weight, **tensors)  # type: ignore[type-var]


def assert_right(y: Tensor, x: Tensor, fmt: Format, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
    """All on the CPU, where torch divides as written: on a GPU it multiplies by a reciprocal, and ties break apart."""
    y, x, weight, bias = y.cpu(), x.cpu(), to_cpu(weight), None if bias is None else bias.cpu()
    if isinstance(fmt, LlmInt8) and fmt.threshold:
        outliers = (x.to(torch.float16).abs() >= fmt.threshold).any(0)
        if int(outliers.sum()) > most_outliers(x.shape[1]):  # then kernels round nothing
            fmt = dataclasses.replace(fmt, threshold=1e-30)
    exact = reference.exact(x, fmt, weight, bias)
    error = relative_error(y, exact)
    assert error < LARGEST_ERROR[str(x.dtype)[6:]]
    assert error < 2 * relative_error(reference.linear(x, fmt, weight, bias), exact)


@pytest.mark.parametrize(
    ("name", "dtype", "tokens"), others_long(product(FORMATS, DTYPES, (3, 11)), cover(FORMATS, DTYPES, (3, 11)))
)
def test_every_format(name: str, dtype: str, tokens: int, device: str) -> None:
    fmt = FORMATS[name]
    x = make_x(tokens, 320, DTYPES[dtype], device)
    quantized, weight = make(fmt, 70, x)
    bias = torch.randn(70, device=device).to(x.dtype)
    out = torch.full((tokens, 70), float("nan"), dtype=x.dtype, device=device)
    config = EightBitConfig(64, 16, 128, 4, 3, splits=2)
    assert matmul(x, weight, config, bias=bias, out=out) is out
    assert_right(out, x, fmt, quantized, bias)
    assert int(weight.tickets.abs().sum()) == 0


@pytest.mark.parametrize("tokens", [1, 8, 9, 33, 64, 65])
def test_outliers_are_those_of_the_format(tokens: int, device: str) -> None:
    fmt = LlmInt8()
    x = make_x(tokens, 200, torch.bfloat16, device)
    _, weight = make(fmt, 8, x)
    rows = quantize_rows(x, weight)
    assert rows.outliers is not None
    count = int(rows.outliers[0])
    expected = (x.to(torch.float16).abs() >= 6).any(0).nonzero().flatten()
    assert rows.outliers[1 : 1 + count].tolist() == expected.tolist()
    served = fmt.served_inputs(x.float())
    kept = torch.ones(200, dtype=torch.bool, device=device)
    kept[expected] = False
    steps = (rows.codes[:, :200].float() - served / rows.scales)[:, kept].abs()
    assert float(steps.max()) < 1.001
    assert float((steps > 1e-3).float().mean()) < 1e-3  # a tie may break the other way


ROUNDED = [name for name in FORMATS if not name.endswith("exact")]
ONE_OF_EACH_KIND = ("llm-int8", "fp8", "fp8-block")  # scales by row and outliers, by row, by block


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        pytest.param(tokens, name, marks=() if name in ONE_OF_EACH_KIND else pytest.mark.long)
        for tokens in (1, 11)
        for name in ROUNDED
    ],
)
def test_slices_of_few_tokens_change_nothing(tokens: int, name: str, device: str) -> None:
    """Rows that several programs write have the bytes of rows that one program writes, where tokens are many."""
    x = make_x(tokens, 4352, torch.bfloat16, device)
    _, weight = make(FORMATS[name], 8, x)
    few, many = quantize_rows(x, weight), quantize_rows(x.repeat(66 // tokens + 1, 1), weight)
    assert torch.equal(few.codes.view(torch.uint8), many.codes[:tokens].view(torch.uint8))
    assert torch.equal(few.scales, many.scales[:tokens])
    if few.outliers is not None and many.outliers is not None:
        count = 1 + int(few.outliers[0])
        assert (count > 1) == (name != "llm-int8-none")
        assert torch.equal(few.outliers[:count], many.outliers[:count])


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (3, "llm-int8"),
        *(pytest.param(tokens, name, marks=pytest.mark.long) for tokens, name in ((12, "llm-int8"), (40, "llm-int8"))),
        pytest.param(66, "w8a8", marks=pytest.mark.long),
    ],
)
def test_rows_that_no_program_holds_whole(tokens: int, name: str, device: str) -> None:
    """Qwen2.5 7B's own: more columns than fit registers, or the shared memory in which outliers are counted."""
    fmt = FORMATS[name]
    x = make_x(tokens, 18944, torch.bfloat16, device)
    _, weight = make(fmt, 8, x)
    rows = quantize_rows(x, weight)
    expected = (x.to(torch.float16).abs() >= 6).any(0).nonzero().flatten() if rows.outliers is not None else []
    if rows.outliers is not None:
        assert rows.outliers[1 : 1 + int(rows.outliers[0])].tolist() == expected.tolist()
    steps = (rows.codes.float() - fmt.served_inputs(x.float()) / rows.scales).abs()
    steps[:, expected] = 0
    assert float(steps.max()) < 1.001
    assert float((steps > 1e-3).float().mean()) < 1e-3  # a tie may break the other way


def with_outliers(count: int, tokens: int, inputs: int, dtype: torch.dtype, device: str) -> Tensor:
    """Exactly `count` outlier columns, each in one token only: the first and the last column are among them."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(tokens, inputs, generator=generator).clamp(-4, 4)
    columns = torch.linspace(0, inputs - 1, count).round().long()
    x[torch.randint(tokens, (count,), generator=generator), columns] = torch.linspace(6, -40, count).abs().clamp(min=6)
    return x.to(dtype).to(device)


@pytest.mark.parametrize(
    ("count", "tokens", "outputs", "inputs", "dtype", "config"),
    [
        (0, 65, 70, 200, "bfloat16", EightBitConfig(64, 32, 128, 4, 3)),
        (3, 65, 70, 201, "bfloat16", EightBitConfig(64, 64, 128, 4, 3)),
        (3, 97, 131, 320, "float16", EightBitConfig(128, 128, 128, 8, 3, splits=2)),
        (64, 70, 40, 333, "bfloat16", EightBitConfig(32, 32, 128, 4, 3, splits=3)),
        (65, 70, 40, 333, "float16", EightBitConfig(32, 32, 128, 4, 3)),
        (100, 131, 130, 384, "bfloat16", EightBitConfig(128, 64, 128, 4, 3, splits=3)),
        (100, 66, 17, 255, "float16", EightBitConfig(64, 128, 128, 4, 3, splits=2)),
    ],
)
def test_outliers_of_many_tokens(
    count: int, tokens: int, outputs: int, inputs: int, dtype: str, config: EightBitConfig, device: str
) -> None:
    fmt = LlmInt8()
    x = with_outliers(count, tokens, inputs, DTYPES[dtype], device)
    quantized, weight = make(fmt, outputs, x)
    bias = torch.randn(outputs, device=device).to(x.dtype)
    y = matmul(x, weight, config, bias=bias)
    assert_right(y, x, fmt, quantized, bias)
    if device == "cuda" or count == 3:  # under the interpreter the second launch takes as long as the first
        assert torch.equal(matmul(x, weight, config, bias=bias), y)
    assert int(weight.tickets.abs().sum()) == 0


@pytest.mark.parametrize(  # more words of bits than are counted at a time
    ("count", "inputs"),
    [
        *((count, 4300) for count in (0, 5, 64, 100)),
        *(pytest.param(count, 16500, marks=pytest.mark.long) for count in (0, 5, 64)),
        (100, 16500),
    ],
)
def test_dense_outliers(count: int, inputs: int, device: str) -> None:
    """What many tokens' outliers are copied to."""
    x = with_outliers(count, 67, inputs, torch.bfloat16, device)
    _, weight = make(LlmInt8(), 5, x)
    rows = quantize_rows(x, weight)
    assert rows.outliers is not None
    assert rows.dense is not None
    listed = rows.outliers[1 : 1 + int(rows.outliers[0])]
    expected = (x.to(torch.float16).abs() >= 6).any(0).nonzero().flatten()
    assert len(expected) == count
    assert listed.tolist() == expected.tolist()
    assert bool((rows.codes[:, expected] == 0).all())
    first = min(count, 64)
    if count:
        assert torch.equal(rows.dense.inputs[:, :first], x[:, expected[:64]])
        assert torch.equal(rows.dense.weights[:, :first], weight.values[:, expected[:64]].to(x.dtype))
        assert not bool(rows.dense.inputs[:, first:].any() or rows.dense.weights[:, first:].any())


def test_many_tokens_of_a_larger_tensor(device: str) -> None:
    """x is a slice: its rows are further apart than they are long."""
    fmt = LlmInt8()
    whole = with_outliers(7, 80, 512, torch.bfloat16, device)
    x = whole[:, 256:]
    quantized, weight = make(fmt, 33, x)
    assert_right(matmul(x, weight, EightBitConfig(32, 64, 128, 4, 3)), x, fmt, quantized)


def test_every_column_an_outlier(device: str) -> None:
    fmt = LlmInt8()
    x = (10 + torch.rand(2, 384)).to(torch.bfloat16).to(device)
    quantized, weight = make(fmt, 40, x)
    assert_right(matmul(x, weight, EightBitConfig(32, 8, 128, 2, 3, splits=3)), x, fmt, quantized)


def test_rows_of_zeros(device: str) -> None:
    for name in ("llm-int8", "w8a8", "fp8", "fp8-block"):
        fmt = FORMATS[name]
        x = torch.zeros(3, 128, dtype=torch.bfloat16, device=device)
        x[1] = 1
        _, weight = make(fmt, 16, x)
        y = matmul(x, weight, EightBitConfig(32, 8, 128, 2, 3))
        assert bool((y[[0, 2]] == 0).all())
        assert bool((y[1] != 0).any())


def test_no_tokens(device: str) -> None:
    x = make_x(1, 128, torch.bfloat16, device)
    _, weight = make(LlmInt8(), 16, x)
    assert matmul(x[:0], weight, EightBitConfig()).shape == (0, 16)


def test_the_same_every_time(device: str) -> None:
    x = make_x(4, 1024, torch.bfloat16, device)
    _, weight = make(LlmInt8(threshold=2.0), 64, x)
    config = EightBitConfig(32, 8, 128, 2, 3, splits=8)
    first = matmul(x, weight, config)
    for _ in range(3 if device == "cuda" else 1):
        assert torch.equal(matmul(x, weight, config), first)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fmt", "inputs"), [(CtFloat8(), 320), (CtFloat8(strategy="block"), 512)], ids=("rows", "blocks")
)
@pytest.mark.parametrize("tokens", [33, 1021])
def test_torch_scaled_matmul(fmt: CtFloat8, inputs: int, tokens: int, device: str) -> None:
    x = make_x(tokens, inputs, torch.bfloat16, device)
    quantized, weight = make(fmt, 270, x)
    if not scaled_mm.supports(weight):
        pytest.skip("not on this GPU")
    bias = torch.randn(270, device=device).to(x.dtype)
    assert_right(scaled_mm.matmul(x, weight, bias=bias), x, fmt, quantized, bias)


def test_wrong_input_is_refused_before_any_launch(device: str) -> None:
    x = make_x(3, 256, torch.bfloat16, device)
    _, weight = make(LlmInt8(), 16, x)
    config = EightBitConfig(32, 8, 128, 2, 3)
    for spoiled, words in (
        (x[0], "shape"),
        (x[:, :128], "must be [any, 256]"),
        (x.float(), "bfloat16, float16"),
        (x.repeat_interleave(2, 1)[:, ::2], "contiguous"),
        (x.to("meta"), "one device"),
    ):
        with pytest.raises(InputError) as refused:
            matmul(spoiled, weight, config)
        assert words in str(refused.value)
    with pytest.raises(InputError, match="bias has shape"):
        matmul(x, weight, config, bias=x.new_zeros(3))
    with pytest.raises(InputError, match="depth of 512"):
        matmul(x, weight, EightBitConfig(32, 8, 512, 2, 3))
    with pytest.raises(InputError, match="do not take IntegerWeight of format 'ct-packed'"):
        eight_bit.lay_out(CtPacked(), CtPacked().quantize(torch.randn(4, 128)))
