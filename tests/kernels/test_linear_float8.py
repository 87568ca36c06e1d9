"""Packed weights in FP8 for steps of many tokens: float8 rows, their products, and who is multiplied how."""

import dataclasses

import pytest
import torch

from quantkit.errors import InputError
from quantkit.formats import (
    Awq,
    CtFloat8,
    CtInt8,
    CtMxfp4,
    CtPacked,
    Float8Weight,
    Format,
    Fp4,
    Gguf,
    Gptq,
    LlmInt8,
    Nf4,
)
from quantkit.formats.float8_rows import float8_rows, row_scales
from quantkit.kernels.card import KNOWN, NO_GPU
from quantkit.kernels.linear import arithmetic, op
from quantkit.kernels.linear.dispatch import choose, to_entry
from quantkit.kernels.linear.eight_bit.weight import EightBitWeight
from quantkit.kernels.linear.fuse import join
from quantkit.kernels.linear.weight_only import float8, float8_codes
from quantkit.kernels.linear.weight_only.dequantize import to_float8_rows
from quantkit.kernels.linear.weight_only.float8_codes import CodesConfig
from quantkit.kernels.linear.weight_only.weight import PackedWeight, lay_out
from quantkit.kernels.reference import linear as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error
from signed_scales import with_signs

pytestmark = pytest.mark.kernel

FORMATS: dict[str, Format] = {
    "w4g128": Gptq(bits=4, group_size=128),
    "w4g128-asym": Gptq(bits=4, group_size=128, sym=False),
    "w4-row": Gptq(bits=4, group_size=-1),
    "awq-w4g64": Awq(bits=4, group_size=64, sym=False),
    "w4g32-asym": CtPacked(bits=4, group_size=32, sym=False),
    "w3g64": CtPacked(bits=3, group_size=64),
    "w2g32-asym": CtPacked(bits=2, group_size=32, sym=False),
    "nf4": Nf4(),
    "fp4": Fp4(double_quant=True),
    "mxfp4": CtMxfp4(),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
W4 = FORMATS["w4g128"]
FP8 = CtFloat8()


def quantized_weight(fmt: Format, outputs: int, inputs: int, device: str = "cpu"):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(outputs)
    weight = 0.02 * torch.randn(outputs, inputs, generator=generator) + 0.005
    return with_signs(fmt.quantize(weight.to(torch.bfloat16).to(device)))


def steps(quantized, *, copied: bool = False) -> float8.Float8Steps:  # type: ignore[no-untyped-def]
    return float8.lay_out(lay_out(quantized), quantized, copied=copied)


def run(name: str, x: torch.Tensor, weight: float8.Float8Steps, **more: torch.Tensor) -> torch.Tensor:
    kernel = weight.kernels[name]
    return kernel.run(x, weight, None, more.get("bias"), more.get("out"))


def test_a_row_has_the_scale_that_loses_least() -> None:
    quantized = quantized_weight(W4, 24, 256)
    rows, decoded = float8_rows(quantized), quantized.dequantize()
    largest = decoded.abs().amax(1, keepdim=True)
    assert torch.equal(row_scales(quantized), rows.scales.flatten())
    assert bool((rows.scales >= largest / 448).all())
    assert bool((rows.scales < largest / 224).all())

    def loss(scales: torch.Tensor) -> torch.Tensor:
        values = (decoded / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
        return (values - decoded).square().sum(1)

    assert bool((loss(rows.scales) <= loss(largest / 448)).all())
    assert float(loss(rows.scales).sum()) < 0.9 * float(loss(largest / 448).sum())


def test_a_row_of_zeros_and_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 128)
    weight[3] = 0
    quantized = W4.quantize(weight)
    whole = float8_rows(quantized)
    monkeypatch.setattr("quantkit.formats.float8_rows._AT_ONCE", 300)
    parts = float8_rows(quantized)
    assert torch.equal(whole.values.view(torch.uint8), parts.values.view(torch.uint8))
    assert torch.equal(whole.scales, parts.scales)
    assert bool(torch.isfinite(whole.dequantize()).all())


@pytest.mark.parametrize(("name", "dtype"), [(name, [*DTYPES][place % 2]) for place, name in enumerate(FORMATS)])
def test_every_kind_of_weight(name: str, dtype: str, device: str) -> None:
    """Values as their meaning has them, but for ties, which are more among those of tables: they are rounded before."""
    fmt = FORMATS[name]
    inputs = 384 if getattr(fmt, "group_size", 0) == 128 else 448
    quantized = quantized_weight(fmt, 72, inputs, device)
    weight, meaning = steps(quantized), float8_rows(quantized)
    decoded = to_float8_rows(weight.packed, weight.row_scales).float()
    assert bool(torch.isfinite(decoded).all())
    differ = (decoded[:72, :inputs] != meaning.values.float()).float().mean()
    assert float(differ) < (3e-3 if weight.packed.table is not None else 1e-4)
    x = torch.randn(17, inputs, device=device).to(DTYPES[dtype])
    bias = torch.randn(72, device=device).to(x.dtype)
    out = torch.full((17, 72), float("nan"), dtype=x.dtype, device=device)
    assert run("float8", x, weight, bias=bias, out=out) is out
    bound = LARGEST_ERROR[dtype] + (2e-3 if weight.packed.table is not None else 0)
    assert relative_error(out, reference.exact(x, FP8, meaning, bias)) < bound
    kept = run("packed", x, weight, bias=bias)
    assert relative_error(kept, reference.exact(x, arithmetic.with_exact_inputs(fmt), quantized, bias)) < bound


@pytest.mark.parametrize(("tokens", "outputs"), [(0, 16), (1, 72), (17, 130), (300, 33)])
def test_any_number_of_tokens_and_outputs(tokens: int, outputs: int, device: str) -> None:
    quantized = quantized_weight(W4, outputs, 128, device)
    x = torch.randn(tokens, 128, device=device, dtype=torch.bfloat16)
    decoded, copied = (run("float8", x, steps(quantized, copied=copied)) for copied in (False, True))
    assert torch.equal(decoded, copied)
    assert decoded.shape == (tokens, outputs)
    if tokens:
        exact = reference.exact(x, FP8, float8_rows(quantized))
        assert relative_error(decoded, exact) < LARGEST_ERROR["bfloat16"]


@pytest.mark.parametrize("copied", [False, True])
def test_act_order(copied: bool, device: str) -> None:
    quantized = quantized_weight(FORMATS["w4g128-asym"], 48, 256, device)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3)).to(device)
    scattered = dataclasses.replace(quantized, group_of=(order // 128).to(torch.int32))
    weight = steps(scattered, copied=copied)
    assert weight.packed.order is not None
    x = torch.randn(3, 256, device=device, dtype=torch.float16)
    exact = reference.exact(x, FP8, float8_rows(scattered))
    assert relative_error(run("float8", x, weight), exact) < LARGEST_ERROR["float16"]


@pytest.mark.parametrize("copied", [False, True])
def test_layers_that_join_compute_what_they_did_apart(copied: bool, device: str) -> None:
    layers = [quantized_weight(W4, outputs, 256, device) for outputs in (256, 128, 40)]
    weights = [steps(layer, copied=copied) for layer in layers]
    joined = join(weights)
    assert isinstance(joined, float8.Float8Steps)
    assert (joined.copy is not None) == copied
    x = torch.randn(5, 256, device=device, dtype=torch.float16)
    for name in ("float8", "packed"):
        apart = torch.cat([run(name, x, weight) for weight in weights], 1)
        assert relative_error(run(name, x, joined), apart.double()) < 1e-3
    assert weights[0].join([lay_out(layers[1])]) is None
    other = steps(quantized_weight(FORMATS["w4g32-asym"], 128, 256, device))
    assert weights[0].join([other]) is None


CODES = [*(name for name in FORMATS if name not in ("nf4", "fp4")), "w3g64"]


@pytest.mark.parametrize("name", dict.fromkeys(CODES))
def test_codes_are_exact_in_float8(name: str, device: str) -> None:
    """Weights are not rounded at all: half of what rounding both costs."""
    fmt = FORMATS[name]
    inputs = 384 if getattr(fmt, "group_size", 0) == 128 else 192
    quantized = quantized_weight(fmt, 72, inputs, device)
    dtype = [*DTYPES.values()][CODES.index(name) % 2]
    x = torch.randn(17, inputs, device=device).to(dtype)
    bias, out = torch.randn(72, device=device).to(dtype), torch.full((17, 72), float("nan"), dtype=dtype, device=device)
    weight = steps(quantized)
    config = CodesConfig(64, 16, 4, 3, splits=2)
    assert weight.kernels["codes"].run(x, weight, config, bias, out) is out
    assert relative_error(out, reference.exact(x, FP8, quantized, bias)) < LARGEST_ERROR[str(dtype)[6:]]
    assert int(weight.packed.tickets.abs().sum()) == 0


@pytest.mark.parametrize(("tokens", "outputs"), [(0, 16), (1, 130), (70, 33)])
def test_codes_with_any_number_of_tokens_and_outputs(tokens: int, outputs: int, device: str) -> None:
    quantized = quantized_weight(FORMATS["w4g128-asym"], outputs, 256, device)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3)).to(device)
    scattered = dataclasses.replace(quantized, group_of=(order // 128).to(torch.int32))
    x = torch.randn(tokens, 256, device=device, dtype=torch.float16)
    y = float8_codes.matmul(x, lay_out(scattered), CodesConfig(64, 64, 4, 3))
    assert y.shape == (tokens, outputs)
    if tokens:
        assert relative_error(y, reference.exact(x, FP8, scattered)) < LARGEST_ERROR["float16"]


@pytest.mark.parametrize("fmt", [Nf4(), CtPacked(bits=8), CtPacked(group_size=16)], ids=lambda fmt: fmt.describe())
def test_what_is_not_exact_in_float8_is_refused(fmt: Format) -> None:
    quantized = fmt.quantize(torch.randn(16, 128))
    with pytest.raises(InputError, match="is not exact in float8"):
        float8_codes.matmul(torch.randn(4, 128, dtype=torch.float16), lay_out(quantized), CodesConfig())
    weight = steps(quantized)
    measured = {weight.kind: {"16x128": {"64": ["codes", 64, 64, 4, 4, 1]}}}
    assert choose(weight, 60, measured).kernel == "packed"
    assert [choice.kernel for choice in weight.candidates(256)] == ["packed", "float8"]


def test_codes_run_where_they_were_measured() -> None:
    quantized = W4.quantize(torch.randn(128, 256))
    weight = steps(quantized)
    tried = [choice for choice in weight.candidates(256) if choice.kernel == "codes"]
    assert {choice.config.splits for choice in tried} >= {1}
    assert not [choice for choice in weight.candidates(32) if choice.kernel == "codes"]
    measured = {"int4-g128-fp8": {"128x256": {"256": to_entry(tried[0])}}}
    assert choose(weight, 256, measured).config == tried[0].config
    assert (
        arithmetic.meaning_of_many(weight, quantized, 8192, torch.bfloat16).fmt == arithmetic.in_float8(quantized).fmt
    )
    assert isinstance(arithmetic.meaning_of_many(weight, quantized, 8192, torch.bfloat16).weight, Float8Weight)
    assert arithmetic.meaning_of_many(weight, quantized, 8, torch.bfloat16).weight is quantized


def test_the_number_of_tokens_decides() -> None:
    """A card that moves bytes faster gains from fewer tokens, and a copy pays sooner."""
    quantized = W4.quantize(torch.randn(128, 256))
    decoded, copied = steps(quantized), steps(quantized, copied=True)
    for card in KNOWN.values():
        few, many = copied.fewest_tokens(card), decoded.fewest_tokens(card)
        assert 32 < few < many / 3
        for weight, fewest in ((copied, few), (decoded, many)):
            assert weight.default(fewest - 1, card).kernel == "packed"
            assert weight.default(fewest, card).kernel == "float8"
    assert decoded.fewest_tokens(KNOWN["sm_100"]) < decoded.fewest_tokens(KNOWN["sm_90"])
    assert "FP8" in op.explain(decoded, 1)
    measured = {"int4-g128-fp8": {"128x256": {"8": ["float8"], "1024": ["packed"]}}}
    assert choose(decoded, 5, measured).kernel == "float8"
    assert choose(decoded, 9000, measured).kernel == "packed"
    assert choose(decoded, 30, measured).kernel == "packed"  # not measured: as estimated
    assert choose(copied, 5, measured).kernel == decoded.default(5, NO_GPU).kernel == "packed"
    assert [choice.kernel for choice in decoded.candidates(64) if getattr(choice.config, "splits", 1) == 1] == [
        "packed",
        "float8",
    ] + ["codes"] * 4


def test_bytes_of_a_copy() -> None:
    quantized = W4.quantize(torch.randn(128, 256))
    packed, decoded, copied = lay_out(quantized), steps(quantized), steps(quantized, copied=True)
    assert decoded.nbytes == packed.nbytes + 4 * 128
    assert copied.nbytes == decoded.nbytes + 128 * 256


W4A8 = CtPacked(activations="fp8")


@pytest.mark.parametrize(
    ("fmt", "asked", "wanted"),
    [
        (W4, None, False),
        (W4, "16-bit", False),
        (W4, "fp8", True),
        (Nf4(), "fp8-copy", True),
        (W4A8, None, True),
        (W4A8, "16-bit", False),
        (CtPacked(bits=8), "fp8", False),
        (CtInt8(), "fp8", False),
        (LlmInt8(), "fp8", False),
        (FP8, "fp8", False),
        (Gguf("Q4_0"), "fp8", False),
    ],
)
def test_who_is_multiplied_in_float8(fmt: Format, asked: str | None, wanted: bool, device: str) -> None:
    """A CPU computes what a GPU computes for many tokens; the GPU keeps few tokens in 16 bits."""
    quantized = fmt.quantize(torch.randn(64, 256, device=device))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weight = op.prepare(fmt, quantized, dtype, asked)
    assert arithmetic.multiplies_in_float8(fmt, quantized, asked) == wanted
    assert isinstance(weight, float8.Float8Steps) == (wanted and device == "cuda")
    meaning = arithmetic.in_float8(quantized) if wanted else arithmetic.meaning_of_few(fmt, quantized, asked)
    x = torch.randn(2, 256, device=device, dtype=dtype)
    y = run("float8", x, weight) if isinstance(weight, float8.Float8Steps) else op.linear(x, weight)
    assert relative_error(y, reference.exact(x, *meaning)) < (1e-5 if device == "cpu" else 2e-2)
    if wanted:
        exact = x.double() @ quantized.dequantize().double().mT
        assert relative_error(y, exact) > 0.01  # float8 rounds x and weight, 2.6 % each
        plain = op.prepare(fmt, quantized, dtype, "16-bit")
        assert relative_error(op.linear(x, plain), exact) < (1e-5 if device == "cpu" else 2e-2)


def test_groups_that_no_kernel_takes_stay_as_they_were() -> None:
    fmt = CtPacked(group_size=96)
    assert not arithmetic.multiplies_in_float8(fmt, fmt.quantize(torch.randn(8, 192)), "fp8")


def test_wrong_input_is_refused(device: str) -> None:
    weight = steps(quantized_weight(W4, 16, 128, device))
    x = torch.randn(4, 128, device=device, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"must be \[any, 128\]"):
        run("float8", x[:, :100], weight)
    with pytest.raises(InputError, match="bias has shape"):
        run("float8", x, weight, bias=x.new_zeros(15))
    with pytest.raises(InputError, match="row_scales has shape"):
        to_float8_rows(weight.packed, weight.row_scales[:-1])
    with pytest.raises(InputError, match="row_scales is float16"):
        to_float8_rows(weight.packed, weight.row_scales.half())


def test_what_is_asked_for_many_tokens_is_a_weight_of_eight_bits(device: str) -> None:
    weight = steps(quantized_weight(FORMATS["w4-row"], 40, 200, device))
    eight = weight.in_float8()
    assert isinstance(eight, EightBitWeight)
    assert isinstance(weight.packed, PackedWeight)
    assert (eight.kind, eight.outputs, eight.inputs) == ("fp8-token", 40, 200)
    assert (eight.rows, eight.columns) == (128, 256)
