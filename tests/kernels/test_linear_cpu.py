"""The CPU products of linear layers against their exact meaning; always on the CPU, whatever else the machine has."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pairwise import cover
from quantkit.errors import InputError
from quantkit.formats import (
    AbsmaxInt8Weight,
    CtFloat8,
    CtInt8,
    CtMxfp4,
    CtNvfp4,
    CtPacked,
    Format,
    Fp4,
    Gptq,
    IntegerWeight,
    LlmInt8,
    Nf4,
    QuantizedWeight,
)
from quantkit.formats.ct_float8 import covering_scales, round_to_float8
from quantkit.kernels.cpu import float8_product, installed, tile_product
from quantkit.kernels.cpu.float8 import LOWERED, RAISED, round_tokens
from quantkit.kernels.cpu.processor import this_processor
from quantkit.kernels.linear.cpu import float_rows, floats, slabs, tiled
from quantkit.kernels.linear.cpu import weight as cpu
from quantkit.kernels.linear.cpu.tiled import Tiles
from quantkit.kernels.linear.fuse import join
from quantkit.kernels.linear.op import explain, linear
from quantkit.kernels.reference import linear as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, ROUNDED_INPUTS, relative_error
from signed_scales import with_signs

pytestmark = pytest.mark.kernel

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS: list[Format] = [
    *(CtPacked(bits=4, group_size=size, sym=sym) for size in (32, 64, 128, 256, -1) for sym in (True, False)),
    *(CtPacked(bits=4, group_size=size, sym=False, dtype="float16") for size in (16, 96, 384)),
    *(CtPacked(bits=bits, group_size=64, sym=sym) for bits in (2, 3, 5, 8) for sym in (True, False)),
    *(CtPacked(bits=8, group_size=-1, sym=sym, dtype="float32") for sym in (True, False)),
    *(Nf4(), Fp4(), CtMxfp4(), CtNvfp4(), LlmInt8(), CtInt8()),
    *(CtFloat8(strategy=strategy) for strategy in ("tensor", "channel", "block")),
    *(CtFloat8(activations="exact"), CtFloat8(strategy="tensor", activations="static")),
]


PRODUCTS = ("as on this CPU", "no compiler and no 16-bit products")


@pytest.fixture(autouse=True, params=PRODUCTS)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "as on this CPU":
        monkeypatch.setattr(installed, "can_compile", lambda: False)
        monkeypatch.setattr(cpu, "product_dtype", lambda dtype: torch.float32)
        monkeypatch.setattr(slabs, "product_dtype", lambda dtype: torch.float32)


def make(fmt: Format, outputs: int, inputs: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.02 + 0.005
    return fmt.with_input_scale(with_signs(fmt.quantize(weight)), 8.0)


def make_x(tokens: int, inputs: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return (torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(tokens)) + mean).to(dtype)


def laid_out(fmt: Format, quantized: QuantizedWeight, dtype: torch.dtype) -> cpu.CpuWeight:
    weight = cpu.lay_out(fmt, quantized, dtype)
    assert weight is not None, cpu.why_not(quantized)
    return weight


def assert_close(x: Tensor, fmt: Format, quantized: QuantizedWeight, bias: Tensor | None = None) -> None:
    """Within the limit of x's dtype, and at most twice as far from the exact result as the plain meaning is; where x is
    rounded to one digit, within the limit of that."""
    weight = laid_out(fmt, quantized, x.dtype)
    y = linear(x, weight, bias)
    assert y.shape == (x.shape[0], quantized.shape[0])
    assert y.dtype == x.dtype
    if y.numel() == 0:
        return
    exact = reference.exact(x, fmt, quantized, bias)
    error = relative_error(y, exact)
    rounded = x.dtype != torch.float32 and x.shape[0] > cpu.PRECISE_TOKENS and not fmt.input_rounding
    if isinstance(weight.held, Tiles) and rounded and not floats.pays(weight.held, x.shape[0], digits=1):
        assert error < ROUNDED_INPUTS
        return
    assert error < LARGEST_ERROR[str(x.dtype)[6:]]
    assert error < max(2e-7, 2 * relative_error(reference.linear(x, fmt, quantized, bias), exact))


def name_of(value: object) -> str:
    return f"{value.name} {value.describe()} {value.dtype}" if isinstance(value, Format) else str(value)


def _cases() -> Iterator[tuple[Format, torch.dtype, str]]:
    """Each in bfloat16, as it is mostly run, and once more: the other dtypes, without a compiler, in turn."""
    others = list(itertools.product(DTYPES[1:], PRODUCTS))
    for number, fmt in enumerate(FORMATS):
        yield fmt, DTYPES[0], PRODUCTS[0]
        yield fmt, *others[number % len(others)]


@pytest.mark.parametrize(("fmt", "dtype", "products"), list(_cases()), indirect=["products"], ids=name_of)
def test_formats(fmt: Format, dtype: torch.dtype) -> None:
    quantized = make(fmt, 200, 768)
    bias = make_x(1, 200, dtype)[0]
    for tokens in (2, 40):
        assert_close(make_x(tokens, 768, dtype), fmt, quantized)
    for tokens in (1, 17):
        assert_close(make_x(tokens, 768, dtype, mean=3), fmt, quantized, bias)


@pytest.mark.parametrize(
    ("fmt", "outputs", "tokens", "products"),
    cover([CtPacked(bits=4, group_size=32, sym=False), Nf4(), CtInt8()], (1, 63, 65, 129), (0, 1, 3, 17, 65), PRODUCTS),
    indirect=["products"],
    ids=name_of,
)
def test_odd_shapes(fmt: Format, outputs: int, tokens: int) -> None:
    assert_close(make_x(tokens, 320, torch.bfloat16), fmt, make(fmt, outputs, 320), torch.ones(outputs).bfloat16())


@pytest.mark.parametrize(
    ("fmt", "inputs", "products"),
    cover([CtPacked(bits=4, group_size=-1), CtInt8(), LlmInt8(), CtFloat8()], (1, 7, 100, 104, 577), PRODUCTS),
    indirect=["products"],
    ids=name_of,
)
def test_odd_inputs(fmt: Format, inputs: int) -> None:
    quantized = make(fmt, 33, inputs)
    for tokens in (1, 5):
        assert_close(make_x(tokens, inputs, torch.bfloat16), fmt, quantized)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_act_order(bits: int, dtype: torch.dtype) -> None:
    fmt = Gptq(bits=bits, group_size=64, sym=False)
    plain = make(fmt, 96, 256)
    assert isinstance(plain, IntegerWeight)
    shuffled = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    scattered = replace(plain, codes=plain.codes[:, shuffled], group_of=plain.input_groups()[shuffled].int())
    for tokens in (1, 40):
        assert_close(make_x(tokens, 256, dtype), fmt, scattered)


@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
@pytest.mark.parametrize("zero", [0, 255])
def test_the_largest_sums(tokens: int, zero: int) -> None:
    """Every product as large as can be, of one sign."""
    codes = torch.full((24, 256), 255 - zero, dtype=torch.uint8)
    scales, zeros = torch.full((24, 2), 1e-3), torch.full((24, 2), zero, dtype=torch.uint8)
    fmt = CtPacked(bits=8, group_size=128, sym=False)
    for sign in (1.0, -1.0):
        x = torch.full((tokens, 256), sign).bfloat16()
        assert_close(x, fmt, IntegerWeight(codes, scales, zeros, 8, 128))


@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_the_largest_sums_of_float8(tokens: int) -> None:
    """The same where float16 adds them up: no sum overflows, with or without an end that is no whole vector."""
    for fmt in (CtFloat8(), CtFloat8(strategy="block")):
        for inputs in (1024, 1001) if fmt.strategy == "channel" else (1024,):
            quantized = fmt.quantize(torch.full((3, inputs), 0.25))
            assert_close(torch.full((tokens, inputs), -3.0).bfloat16(), fmt, quantized)


@pytest.mark.parametrize("tokens", [1, 8])
def test_zero_points_far_from_the_middle(tokens: int) -> None:
    """Inputs with a mean add up whatever error zero points have."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 2048), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(64, 16, generator=generator) + 0.5).bfloat16()
    zeros = torch.randint(0, 16, (64, 16), dtype=torch.uint8, generator=generator)
    fmt = CtPacked(bits=4, group_size=128, sym=False)
    assert_close(make_x(tokens, 2048, torch.bfloat16, mean=3), fmt, IntegerWeight(codes, scales, zeros, 4, 128))


def test_more_than_one_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB", 1000)  # 7 rows of 128, and one row of 2048
    for fmt, inputs in ((Nf4(), 128), (CtPacked(bits=3, group_size=64), 2048)):
        assert_close(make_x(9, inputs, torch.float16), fmt, make(fmt, 40, inputs), torch.ones(40).half())


@pytest.mark.parametrize("products", ["as on this CPU"], indirect=True)
@pytest.mark.parametrize("tokens", [9, 131])
@pytest.mark.parametrize("fmt", [*(CtPacked(bits=bits, group_size=32, sym=bits == 3) for bits in (3, 4, 8)), Nf4()])
def test_bytes_for_many_tokens(fmt: Format, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this processor would rather decode codes for each few tokens, or multiply floats."""
    monkeypatch.setattr(floats, "pays", lambda *asked, **named: False)
    for size, registers in tiled.REGISTERS.items():
        monkeypatch.setitem(tiled.REGISTERS, size, registers._replace(wide_from=(1, 1)))
    monkeypatch.setattr(tiled, "WITHOUT_VNNI", tiled.REGISTERS[64])
    assert_close(make_x(tokens, 768, torch.bfloat16), fmt, make(fmt, 50, 768))


@pytest.mark.parametrize("products", ["as on this CPU"], indirect=True)
def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(fmt: Format, dtype: torch.dtype) -> str:
        return explain(laid_out(fmt, make(fmt, 64, 128), dtype), 1).split(":")[0]

    packed = [CtPacked(bits=4, group_size=32), CtInt8(), Nf4(), LlmInt8()]
    assert {chosen(fmt, dtype) for fmt in packed for dtype in DTYPES} == {"tiles"}
    in_tiles = tile_product.takes(this_processor(), 1) and not float8_product.fits(torch.bfloat16)
    assert chosen(CtFloat8(), torch.bfloat16) == ("tiles" if in_tiles else "slabs")
    monkeypatch.setattr(installed, "can_compile", lambda: False)
    assert {chosen(fmt, torch.bfloat16) for fmt in packed} == {"slabs"}


@pytest.mark.parametrize("products", ["as on this CPU"], indirect=True)
@pytest.mark.parametrize("fmt", [CtPacked(bits=3, group_size=64, sym=False), Nf4(), CtInt8(), CtFloat8()], ids=name_of)
def test_joined(fmt: Format) -> None:
    """Layers that read the same input become one where they differ in their outputs alone."""
    parts = [make(fmt, outputs, 192) for outputs in (128, 256, 33)]
    weights, x = [laid_out(fmt, part, torch.bfloat16) for part in parts], make_x(3, 192, torch.bfloat16)
    joined = join(weights)
    assert joined is not None
    assert torch.equal(linear(x, joined), torch.cat([linear(x, weight) for weight in weights], 1))
    assert join([weights[0], laid_out(fmt, make(fmt, 16, 256), torch.bfloat16)]) is None
    assert join([weights[0], laid_out(fmt, parts[1], torch.float16)]) is None
    assert join([weights[2], weights[0]]) is None


@pytest.mark.parametrize("products", ["as on this CPU"], indirect=True)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(broken: float) -> None:
    """In its own token alone."""
    fmt = CtPacked(bits=4, group_size=32)
    for tokens in (2, 5):
        x = make_x(tokens, 128, torch.bfloat16)
        x[1, 77] = broken
        y = linear(x, laid_out(fmt, make(fmt, 40, 128), torch.bfloat16))
        assert y.isfinite().all(1).tolist() == [token != 1 for token in range(tokens)]
        assert not y[1].isfinite().any()


@pytest.mark.parametrize(
    ("stored", "dtype", "tokens", "inputs", "biased", "products"),
    cover(DTYPES, DTYPES, (1, 2, 7, float_rows.MOST_TOKENS + 1), (96, 101), (False, True), PRODUCTS),
    indirect=["products"],
    ids=str,
)
def test_weights_that_are_not_quantized(
    stored: torch.dtype, dtype: torch.dtype, tokens: int, inputs: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the dtype of x, or of 16 bits beside float32."""
    monkeypatch.setattr(slabs, "SLAB", 1000)  # several slabs, the last one smaller
    stored = stored if dtype == torch.float32 else dtype
    weight, x = make_x(50, inputs, stored), make_x(2 * tokens, inputs, dtype, mean=1)[::2]
    bias = make_x(1, 50, dtype)[0] if biased else None
    y = slabs.plain(x, weight, bias)
    assert y.dtype == dtype
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert relative_error(y, exact) < LARGEST_ERROR[str(dtype)[6:]]


@pytest.mark.parametrize("products", ["as on this CPU"], indirect=True)
@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_outlier_columns_are_not_rounded(threshold: float, tokens: int) -> None:
    """In the last columns, in neighbours, and in one token alone."""
    fmt = LlmInt8(threshold=threshold)
    x = make_x(tokens, 577, torch.bfloat16)
    x[-1, [0, 5, 6, 575, 576]] = torch.tensor([6.0, -300.0, 77.0, 8.0, -70000.0], dtype=torch.bfloat16)
    assert_close(x, fmt, make(fmt, 33, 577))


@pytest.mark.parametrize("products", ["as on this CPU"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 33])
@pytest.mark.parametrize("count", [65])
def test_outliers_in_many_columns(count: int, tokens: int, dtype: torch.dtype) -> None:
    fmt, inputs = LlmInt8(), 640
    x = make_x(tokens, inputs, dtype).clamp(-4, 4)
    x[tokens // 2, torch.linspace(0, inputs - 1, count).round().long()] = 9.0
    assert_close(x, fmt, make(fmt, 50, inputs))


@pytest.mark.parametrize("products", ["as on this CPU"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "fmt", [CtFloat8(), CtFloat8(strategy="block"), CtFloat8(activations="exact")], ids=lambda fmt: fmt.describe()
)
def test_float8_in_rows(fmt: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As processors have it whose vectors are shorter."""
    monkeypatch.setattr(tile_product, "takes", lambda processor, tokens: False)
    quantized = make(fmt, 200, 768)
    assert type(laid_out(fmt, quantized, dtype).held).__name__ == "Rows"  # type: ignore[attr-defined]
    for tokens in (1, 3, 17):
        assert_close(make_x(tokens, 768, dtype), fmt, quantized, make_x(1, 200, dtype)[0])


def test_float8_rounds_as_torch_does() -> None:
    """Every value with its neighbours and middles, too small and too large ones; one scale, or one for each half."""
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    near = torch.cat([every, (every[1:] + every[:-1]) / 2, torch.tensor([1e-6, 460.0, 1e9])])
    x = torch.cat([near, -near, near * 1.001, near * 0.999])[None].repeat(3, 1)
    for groups, scale in ((1, 1.0), (2, None)):
        values, scales = round_tokens(x, groups, scale)
        values = in_order(values, groups)
        sizes = scales.repeat_interleave(x.shape[1] // groups, 1)
        assert torch.equal(values / RAISED, round_to_float8(x, sizes).float())
        assert torch.equal(round_tokens(x, groups, scale, halves=True)[0].float() / LOWERED, values / RAISED)
        expected = covering_scales(x.view(3, groups, -1).abs().amax(-1))
        assert torch.equal(scales, expected if scale is None else torch.ones(3, 1))


def in_order(values: Tensor, groups: int) -> Tensor:
    """What lies in quads, as far as a group has whole ones."""
    parts = values.view(len(values), groups, -1)
    whole = parts.shape[2] // 64 * 64
    head = parts[:, :, :whole].unflatten(2, (-1, 4, 16)).mT.flatten(2)
    return torch.cat([head, parts[:, :, whole:]], 2).flatten(1)


def test_four_bits_take_half_a_byte() -> None:
    quantized = make(Nf4(), 256, 1024)
    assert laid_out(Nf4(), quantized, torch.bfloat16).nbytes < 0.6 * quantized.codes.nbytes  # type: ignore[attr-defined]
    fmt = CtPacked(bits=4, group_size=128)
    assert laid_out(fmt, make(fmt, 256, 1024), torch.float16).nbytes < 0.6 * 256 * 1024
    assert laid_out(fmt, make(fmt, 256, 1024), torch.bfloat16).nbytes < 0.6 * 256 * 1024


def test_out_and_strides() -> None:
    """Rows of x that lie apart, and a result inside a larger tensor."""
    for fmt in (CtPacked(bits=4, group_size=32), CtInt8(), Nf4()):
        quantized = make(fmt, 40, 128)
        wide = make_x(5, 300, torch.bfloat16)
        x, out = wide[:, 1:129], torch.full((5, 50), 7.0).bfloat16()
        y = linear(x, laid_out(fmt, quantized, x.dtype), out=out[:, 3:43])
        assert y.data_ptr() == out[:, 3:].data_ptr()
        assert torch.equal(y, linear(x.contiguous(), laid_out(fmt, quantized, x.dtype)))
        assert bool((out[:, :3] == 7).all())
        assert bool((out[:, 43:] == 7).all())


def test_weights_it_leaves_to_others() -> None:
    ragged = replace(make(CtPacked(group_size=64), 8, 128), group_of=torch.zeros(128, dtype=torch.int32))  # type: ignore[type-var]
    assert cpu.lay_out(CtPacked(group_size=64), ragged, torch.float16) is None
    assert "do not divide 128 inputs" in str(cpu.why_not(ragged))
    across = make(Nf4(), 8, 100)
    assert cpu.lay_out(Nf4(), across, torch.float16) is None
    assert "across the ends of rows of 100 inputs" in str(cpu.why_not(across))
    blocks = CtFloat8(strategy="block")
    assert cpu.lay_out(blocks, make(blocks, 8, 200), torch.float16) is None


def test_refuses_what_it_cannot_take() -> None:
    fmt = CtPacked(bits=4, group_size=32)
    quantized = make(fmt, 40, 128)
    weight, x = laid_out(fmt, quantized, torch.bfloat16), make_x(3, 128, torch.bfloat16)
    refused = [
        (r"x has shape \[3, 127\], but must be \[any, 128\]", lambda: linear(x[:, 1:], weight)),
        (r"x has shape \[128\]", lambda: linear(x[0], weight)),
        ("x is float16, but must be bfloat16", lambda: linear(x.half(), weight)),
        (r"bias has shape \[3\], but must be \[40\]", lambda: linear(x, weight, x[:, 0])),
        ("bias is float32", lambda: linear(x, weight, torch.zeros(40))),
        (r"out has shape \[3, 128\], but must be \[3, 40\]", lambda: linear(x, weight, out=x)),
        ("out is float32", lambda: linear(x, weight, out=torch.zeros(3, 40))),
        ("one device", lambda: linear(x.to("meta"), weight)),
        ("dtype is float64", lambda: cpu.lay_out(fmt, quantized, torch.float64)),
        ("move it to the CPU", lambda: cpu.lay_out(LlmInt8(), make_meta(), torch.bfloat16)),
    ]
    for words, call in refused:
        with pytest.raises(InputError, match=words):
            call()


def make_meta() -> AbsmaxInt8Weight:
    return AbsmaxInt8Weight(torch.zeros(8, 16, dtype=torch.int8, device="meta"), torch.ones(8, device="meta"))
