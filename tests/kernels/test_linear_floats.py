"""Products in float32 on a CPU, from codes of every kind, against what these mean."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gguf_files import random_blocks
from quantkit.formats import CtFloat8, CtInt8, CtMxfp4, CtPacked, Format, LlmInt8, Nf4, QuantizedWeight
from quantkit.formats.gguf import Gguf
from quantkit.kernels.cpu import panel_product, processor, tile_product
from quantkit.kernels.cpu.pool import shared_pool
from quantkit.kernels.cpu.processor import KNOWN
from quantkit.kernels.cpu.token_rounding import rounded_floats
from quantkit.kernels.cpu.widening import widened
from quantkit.kernels.linear.cpu import floats
from quantkit.kernels.linear.cpu import weight as cpu
from quantkit.kernels.linear.cpu.tiled import Tiles
from quantkit.kernels.reference import linear as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error
from signed_scales import with_signs

pytestmark = pytest.mark.kernel

SHAPES = ((1, 2), (1, 6), (2, 8))  # tiles and tokens at a time, as processors have them
FORMATS: list[Format] = [
    *(CtPacked(bits=bits, group_size=32, sym=False) for bits in (2, 3, 4, 8)),
    *(CtPacked(bits=4, group_size=-1), CtPacked(bits=4, group_size=48, sym=False), Nf4(), CtMxfp4()),
    *(Gguf(kind) for kind in ("Q2_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS")),
    *(CtFloat8(strategy="channel", activations="exact"), CtFloat8(strategy="block", activations="exact")),
]


def make(fmt: Format, outputs: int, inputs: int) -> QuantizedWeight:
    if isinstance(fmt, Gguf):
        return fmt.unpack({"weight": random_blocks(fmt.kind, outputs, inputs, 0)})
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)) * 0.02 + 0.005
    return with_signs(fmt.quantize(weight))


def multiplied(x: Tensor, fmt: Format, quantized: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    weight = cpu.lay_out(fmt, quantized, x.dtype)
    assert weight is not None
    y = torch.full((len(x), quantized.shape[0] + 3), 7.0, dtype=x.dtype)
    if isinstance(weight.held, Tiles) and weight.held.float8:
        x = widened(x, raised=True)
    floats.multiply(x, weight.held, bias, y[:, : quantized.shape[0]], rounding=fmt.input_rounding)
    assert bool((y[:, -3:] == 7).all())
    return y[:, :-3]


def _cases() -> Iterator[tuple[Format, tuple[int, int], int, int]]:
    """Each in every shape; tokens and outputs, which fill neither their panels nor their tiles, in turn."""
    sizes = ((1, 33), (5, 16), (9, 50), (131, 40))
    for number, fmt in enumerate(FORMATS):
        for place, shape in enumerate(SHAPES):
            yield fmt, shape, *sizes[(number + place) % len(sizes)]


def name_of(value: object) -> str:
    return f"{value.name} {value.describe()}" if isinstance(value, Format) else str(value)


@pytest.mark.parametrize(("fmt", "shape", "tokens", "outputs"), list(_cases()), ids=name_of)
def test_codes_of_every_kind(
    fmt: Format, shape: tuple[int, int], tokens: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel_product, "shape_for", lambda processor, tokens: shape)
    monkeypatch.setattr(tile_product, "takes", lambda processor, tokens: False)
    check(fmt, tokens, outputs)


FEW = [*((fmt, tokens) for fmt in FORMATS for tokens in (1, 2, 7)), *((fmt, 20) for fmt in FORMATS[-2:])]


@pytest.mark.parametrize(("fmt", "tokens"), FEW, ids=name_of)
def test_few_tokens(fmt: Format, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In registers, on any processor; the last tokens are not as many as are multiplied at a time. FP8 is laid out in
    tiles then, and more tokens are multiplied by panels of these."""
    monkeypatch.setattr(tile_product, "takes", lambda processor, tokens: tokens <= 8)
    check(fmt, tokens, 50)


def check(fmt: Format, tokens: int, outputs: int) -> None:
    quantized = make(fmt, outputs, 768)
    x = torch.randn(2 * tokens, 768, generator=torch.Generator().manual_seed(tokens))[::2]
    bias = torch.randn(outputs) if tokens % 2 else None
    y = multiplied(x, fmt, quantized, bias)
    exact = x.double() @ quantized.dequantize().double().T + (0 if bias is None else bias.double())
    assert relative_error(y, exact) < 3e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fmt", [CtInt8(), LlmInt8(), LlmInt8(threshold=0.0)], ids=name_of)
def test_rounded_inputs(fmt: Format, dtype: torch.dtype) -> None:
    """Outliers in the last columns, in neighbours, and in one token alone; inputs that fill no vector."""
    quantized = make(fmt, 33, 577)
    x = torch.randn(11, 577, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[-1, [0, 5, 6, 575, 576]] = torch.tensor([6.0, -300.0, 77.0, 8.0, -60000.0], dtype=dtype)
    exact = reference.exact(x, fmt, quantized, None)
    error = relative_error(multiplied(x, fmt, quantized), exact)
    assert error < max(LARGEST_ERROR[str(dtype)[6:]] if dtype != torch.float32 else 0, 3e-7)


def test_rounded_floats_are_what_digits_stand_for() -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    x[1, 7] = 9.0
    found = rounded_floats(shared_pool(), x, 6.0, 48)
    assert found.shape == (3, 48)
    assert bool((found[:, 40:] == 0).all())
    assert torch.equal(found[:, 7], x[:, 7])
    rest = torch.cat([x[:, :7], x[:, 8:]], 1).half().float()
    scales = rest.abs().amax(1, keepdim=True) / 127
    expected = (rest / scales).round() * scales
    assert relative_error(torch.cat([found[:, :7], found[:, 8:40]], 1), expected.double()) < 1e-6


def test_what_is_not_finite_stays_so() -> None:
    fmt = CtPacked(bits=4, group_size=32)
    x = torch.randn(9, 128)
    x[1, 77], x[4, 0] = float("nan"), float("inf")
    y = multiplied(x, fmt, make(fmt, 40, 128))
    assert y.isfinite().all(1).tolist() == [token not in (1, 4) for token in range(9)]


def test_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everywhere in float32; in 16 bits where a processor has no instruction for the bytes of codes, with AVX-512 and a
    table from the first token on."""

    def fewest(fmt: Format, digits: int) -> float:
        weight = cpu.lay_out(fmt, make(fmt, 16, 256), torch.bfloat16)
        assert weight is not None
        counts = (1, 2, 3, 8, 64, 512)
        return next((count for count in counts if floats.pays(weight.held, count, digits)), 0)

    w4, w8, nf4 = CtPacked(bits=4, group_size=128), CtPacked(bits=8, group_size=128), Nf4()
    formats = w4, w8, nf4
    for name, one, two, three in (
        ("cascadelake", (0, 0, 0), (0, 0, 0), (3, 3, 2)),
        ("skylake-avx512", (0, 8, 1), (0, 2, 1), (3, 1, 1)),
        ("haswell", (0, 8, 8), (0, 8, 8), (3, 3, 2)),
        ("x86-64", (8, 8, 8), (8, 8, 8), (3, 3, 2)),
    ):
        monkeypatch.setattr(processor, "this_processor", lambda name=name: KNOWN[name])
        found = [tuple(fewest(fmt, digits) for fmt in formats) for digits in (1, 2, 3)]
        assert found == [one, two, three], name
    assert fewest(replace(w4, group_size=32), 1) == 8


def test_float8_of_inputs_that_fill_no_vectors_is_left_to_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not in tiles."""
    monkeypatch.setattr(tile_product, "takes", lambda processor, tokens: False)
    fmt = CtFloat8()
    for inputs, fits in ((96, False), (192, True)):
        weight = cpu.lay_out(fmt, make(fmt, 16, inputs), torch.bfloat16)
        assert weight is not None
        assert floats.pays(weight.held, 9, 1) == fits
