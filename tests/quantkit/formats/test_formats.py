"""Every format, on odd shapes: what `pack` writes, `unpack` reads, and the error stays within half a step."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.errors import CannotHold, InputError
from quantkit.formats import (
    FORMATS,
    Awq,
    BlockMxfp4,
    CodebookWeight,
    CtFloat8,
    CtInt8,
    CtMxfp4,
    CtNvfp4,
    CtPacked,
    Format,
    Fp4,
    Gptq,
    IntegerFormat,
    IntegerWeight,
    LlmInt8,
    Nf4,
    build,
)
from quantkit.formats.base import ANY_LENGTH, DTYPES
from quantkit.formats.codebook import dynamic_table, table_of

GROUPS = st.sampled_from([-1, 32, 64])
SCALES = st.sampled_from(["float16", "bfloat16", "float32"])
FLOAT4: dict[str, Format] = {fmt.name: fmt for fmt in (CtMxfp4(), BlockMxfp4(), CtNvfp4())}
SCALE_ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24}  # relative


@st.composite
def formats_and_shapes(draw: st.DrawFn) -> tuple[Format, tuple[int, int]]:
    """A format with random options, and a shape that it allows but nobody would choose."""
    kind = draw(st.sampled_from(sorted(FORMATS)))
    out, inputs = draw(st.integers(1, 67)), 64 * draw(st.integers(1, 4))
    if kind == "gptq":
        bits, version, sym = draw(st.sampled_from([2, 3, 4, 8])), draw(st.sampled_from([1, 2])), draw(st.booleans())
        return Gptq(bits=bits, group_size=draw(GROUPS), sym=sym, version=version), (out, inputs)
    if kind == "awq":
        return Awq(group_size=draw(GROUPS), sym=draw(st.booleans()), dtype=draw(SCALES)), (8 * out, inputs)
    if kind == "ct-packed":
        bits = draw(st.integers(2, 8))
        odd = draw(st.integers(9, 131))
        return CtPacked(bits=bits, group_size=-1, sym=draw(st.booleans()), dtype=draw(SCALES)), (out, odd)
    if kind in FLOAT4:
        return FLOAT4[kind], (out, inputs // 2)
    odd_shape = (out, draw(st.integers(1, 131)))
    if kind in ("nf4", "fp4"):
        cls = Nf4 if kind == "nf4" else Fp4
        return cls(block=draw(st.sampled_from([32, 64, 4096])), double_quant=draw(st.booleans())), odd_shape
    if kind == "ct-float8":
        strategy = draw(st.sampled_from(["tensor", "channel", "block"]))
        return CtFloat8(strategy=strategy, dtype=draw(SCALES)), (3 * out, 2 * odd_shape[1])
    return (LlmInt8() if kind == "llm-int8" else CtInt8(dtype=draw(SCALES))), odd_shape


def random_weight(shape: tuple[int, int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 0.05
    if seed % 3 == 0:
        weight[0] = 0  # an empty row
    if seed % 5 == 0:
        weight = weight.abs()  # asymmetric grids then want a zero point of 0
    return weight


@settings(deadline=None, max_examples=300)
@given(case=formats_and_shapes(), seed=st.integers(0, 2**16))
def test_round_trip(case: tuple[Format, tuple[int, int]], seed: int) -> None:
    fmt, shape = case
    weight = random_weight(shape, seed)
    quantized = fmt.quantize(weight)
    parts = fmt.pack(quantized)
    assert_parts_as_announced(fmt, shape, parts)
    read = fmt.unpack(parts)
    assert read.shape == shape
    assert torch.equal(read.dequantize(), quantized.dequantize())
    again = fmt.pack(read)
    assert all(torch.equal(bytes_of(parts[name]), bytes_of(again[name])) for name in parts)
    sizes = {name: tuple(part.shape) for name, part in parts.items()}
    assert fmt.stored_shape(sizes, parts.__getitem__) == shape
    assert within_half_a_step(read.dequantize(), weight, fmt)


def assert_parts_as_announced(fmt: Format, shape: tuple[int, int], parts: dict[str, Tensor]) -> None:
    announced = fmt.parts(shape)
    assert set(parts) == set(announced) <= set(fmt.suffixes)
    for name, spec in announced.items():
        assert parts[name].dtype == spec.dtype, name
        assert ANY_LENGTH in spec.shape or tuple(parts[name].shape) == spec.shape, name
        assert parts[name].is_contiguous(), name


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def within_half_a_step(decoded: Tensor, weight: Tensor, fmt: Format) -> bool:
    return bool(((decoded - weight).abs() <= largest_error(fmt, weight)).all())


def largest_error(fmt: Format, weight: Tensor) -> Tensor:
    """What rounding each value to the nearest of its grid may cost, from the weight alone: a wrong grid shows too.

    Half a step, and as much as the ends of the grid move when its scale is rounded; scales are never subnormal.
    """
    scale, smallest = SCALE_ROUNDING[fmt.dtype], torch.finfo(DTYPES[fmt.dtype]).tiny
    if isinstance(fmt, IntegerFormat):
        groups = weight.unflatten(-1, (-1, fmt.group_width(weight.shape[1])))
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        codes = (1 << fmt.bits) - 1
        asymmetric = (high - low) / (codes - fmt.zero_floor)  # version 1 of GPTQ may lose the lowest code
        step = 2 * torch.maximum(-low, high) / codes if fmt.sym else asymmetric
        half = (step.clamp(min=smallest) * (0.5 + (codes + 1) * scale)).expand_as(groups).flatten(-2)
    elif isinstance(fmt, (Nf4, Fp4)):
        table = table_of(fmt.kind).sort().values
        absmax = block_absmax(weight, fmt.block)
        nested = absmax.max() / 128 if fmt.double_quant else 0.0  # half of the widest gap in the second table
        half = absmax * table.diff().max() / 2 + nested
    elif fmt.name in FLOAT4:
        nearest_power = fmt.name != "ct-nvfp4"  # a block up to twice as large may have the same
        smallest_scale = 0.0 if nearest_power else weight.abs().max() / 448 * 2**-10  # half a step of E4M3's smallest
        half = block_absmax(weight, 32 if nearest_power else 16) / (4 if nearest_power else 5) + smallest_scale
    elif isinstance(fmt, LlmInt8):
        half = weight.abs().amax(-1, keepdim=True) / 127 / 2 * (1 + 2**-11) + weight.abs() * 2**-11  # it sees float16
    else:
        assert isinstance(fmt, CtFloat8)
        subnormal = (weight.abs().max() / 448).clamp(min=smallest) * 2**-10  # half of their step
        half = weight.abs() * (2**-4 + scale) + subnormal  # three bits after the leading one
    return half * (1 + 1e-4)


def block_absmax(weight: Tensor, block: int) -> Tensor:
    """The largest magnitude of each value's block; blocks go across the ends of rows, the last one may be short."""
    padded = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % block)).view(-1, block)
    return padded.abs().amax(-1, keepdim=True).expand_as(padded).flatten()[: weight.numel()].view_as(weight)


EVERY_WIDTH: list[Format] = [
    *(Gptq(bits=bits, group_size=64, sym=sym) for bits in (2, 3, 4, 8) for sym in (True, False)),
    *(CtPacked(bits=bits, group_size=64, sym=sym) for bits in range(2, 9) for sym in (True, False)),
    *(Awq(group_size=64), Awq(group_size=64, sym=True), CtInt8(), LlmInt8()),
    *(CtFloat8(strategy=strategy) for strategy in ("tensor", "channel", "block")),
    *(Nf4(), Nf4(double_quant=False), Fp4(), Fp4(double_quant=False)),
    *FLOAT4.values(),
]


@pytest.mark.parametrize("fmt", EVERY_WIDTH, ids=lambda fmt: f"{fmt.name} {fmt.describe()}")
@pytest.mark.parametrize("positive", [False, True])
def test_half_a_step_tells_right_from_wrong(fmt: Format, positive: bool) -> None:
    """What a broken format gives fails: nothing, a constant, or the right values in wrong places."""
    weight = random_weight((64, 128), 5 if positive else 1)
    decoded = fmt.quantize(weight).dequantize()
    assert within_half_a_step(decoded, weight, fmt)
    wrong = {
        "zeros": torch.zeros_like(weight),
        "a constant": weight.mean().expand_as(weight),
        "a constant per row": weight.mean(-1, keepdim=True).expand_as(weight),
        "a constant per group": weight.unflatten(-1, (-1, 64)).mean(-1, keepdim=True).expand(-1, -1, 64).flatten(-2),
        "negated": -decoded,
        "next row": decoded.roll(1, 0),
        "next column": decoded.roll(1, 1),
        "transposed": decoded.T.reshape(weight.shape),
        "twice the scale": 2 * decoded,
    }
    wrong["zeros in the last row"] = decoded.index_fill(0, torch.tensor(63), 0)
    passed = [name for name, tensor in wrong.items() if within_half_a_step(tensor, weight, fmt)]
    assert not passed


def test_gptq_act_order_keeps_original_row_order() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (8, 64), generator=generator).to(torch.uint8)
    group_of = torch.randperm(64, generator=generator).to(torch.int32) // 32
    weight = IntegerWeight(codes, torch.rand(8, 2).half(), torch.full((8, 2), 8, dtype=torch.uint8), 4, 32, group_of)
    fmt = Gptq(group_size=32, act_order=True)
    parts = fmt.pack(weight)
    assert torch.equal(parts["g_idx"], group_of)
    by_hand = (codes.float() - 8) * weight.scales.float()[:, group_of.long()]
    assert torch.equal(fmt.decode(parts), by_hand)
    with pytest.raises(CannotHold, match="act-order"):
        Gptq(group_size=32).pack(weight)
    with pytest.raises(CannotHold, match="act-order"):
        CtPacked(group_size=32).pack(weight)
    with pytest.raises(CannotHold, match="act-order"):
        Awq(group_size=32, sym=True).pack(weight)


@pytest.mark.parametrize(("version", "word"), [(1, 0x77777777), (2, 0x88888888 - (1 << 32))])
def test_gptq_symmetric_zero_words(version: int, word: int) -> None:
    parts = Gptq(version=version).encode(torch.randn(8, 128))
    assert parts["qzeros"].tolist() == [[word]]


def test_gptq_v1_reads_whole_word_borrow() -> None:
    """GPTQModel stores z - 1 by subtracting 0x11111111 from the word, so a 0 borrows from its neighbour."""
    zeros = torch.tensor([[0, 5, 8, 15, 0, 0, 1, 2]], dtype=torch.uint8)
    v2 = Gptq(sym=False, version=2, group_size=-1)
    codes = torch.zeros(8, 8, dtype=torch.uint8)
    parts = v2.pack(IntegerWeight(codes, torch.ones(8, 1).half(), zeros.T.contiguous(), 4, 8))
    borrowed = parts | {"qzeros": parts["qzeros"] - 0x11111111}
    assert torch.equal(Gptq(sym=False, version=1, group_size=-1).unpack(borrowed).zeros, zeros.T)


def test_gptq_v1_never_needs_a_zero_point_of_zero() -> None:
    weight = torch.rand(8, 128) + 0.5  # all positive
    quantized = Gptq(sym=False).quantize(weight)
    assert int(quantized.zeros.min()) >= 1
    assert float((quantized.dequantize() - weight).abs().max()) < 0.06
    with pytest.raises(CannotHold, match="version 2"):
        Gptq(sym=False).pack(Gptq(sym=False, version=2).quantize(weight))


def test_awq_column_order() -> None:
    codes = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 8)  # column c of the word holds code c
    weight = IntegerWeight(codes, torch.ones(8, 1).half(), torch.zeros(8, 1, dtype=torch.uint8), 4, 8)
    assert Awq(group_size=8).pack(weight)["qweight"].tolist() == [[0x75316420]] * 8


def test_nf4_bytes_hold_the_earlier_code_in_the_high_half() -> None:
    table = table_of("nf4")
    parts = Nf4(double_quant=False).encode(table[None].repeat(1, 4))
    assert parts["weight"].flatten().tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF] * 4
    state = json.loads(bytes(parts["weight.quant_state.bitsandbytes__nf4"].tolist()))
    assert state == {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [1, 64]}


def test_every_table_entry_is_its_own_nearest() -> None:
    for kind in ("nf4", "fp4"):
        weight = table_of(kind)[None]
        codes = Nf4(block=32).quantize(weight) if kind == "nf4" else Fp4(block=32).quantize(weight)
        zero = weight[0] == 0  # FP4 has two zeros
        assert torch.equal(codes.codes[~zero], torch.arange(16, dtype=torch.uint8)[~zero])


def test_dynamic_table_is_the_published_one() -> None:
    table = dynamic_table()
    assert len(table) == 256
    assert table[0] == pytest.approx(-0.99296874, abs=1e-8)
    assert table[127] == 0
    assert table[255] == 1


def test_double_quantization_can_be_undone_but_not_invented() -> None:
    nested = Nf4().quantize(torch.randn(64, 64))
    plain = Nf4(double_quant=False)
    assert torch.equal(plain.decode(plain.pack(nested)), nested.dequantize())
    with pytest.raises(CannotHold, match="second time"):
        Nf4().pack(plain.quantize(torch.randn(64, 64)))


def test_llm_int8_rows() -> None:
    parts = LlmInt8().encode(torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]]))
    assert parts["weight"].tolist() == [[64, -127, 32], [0, 0, 0]]
    assert parts["SCB"].tolist() == [2.0, 0.0]


def test_old_compressed_tensors_three_bit_padding() -> None:
    """Versions up to 0.16 put ten 3-bit codes in a word and left two bits unused."""
    fmt = CtPacked(bits=3, group_size=-1)
    dense = fmt.encode(torch.randn(4, 64))
    codes = fmt.unpack(dense).codes
    old = torch.zeros(4, 7, dtype=torch.int32)
    for k in range(64):
        old[:, k // 10] |= codes[:, k].int() << (3 * (k % 10))
    assert torch.equal(fmt.unpack(dense | {"weight_packed": old}).codes, codes)


@pytest.mark.parametrize(
    ("fmt", "shape", "words"),
    [
        (Gptq(group_size=48), (8, 128), "128, which 48 does not divide"),
        (Gptq(bits=3, group_size=8), (8, 40), "40, which 32 does not divide"),
        (Awq(group_size=32), (12, 64), "12, which 8 does not divide"),
        (CtMxfp4(), (8, 48), "48, which 32 does not divide"),
        (CtNvfp4(), (8, 24), "24, which 16 does not divide"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(fmt: Format, shape: tuple[int, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fmt.check(shape)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gptk", {}, "did you mean 'gptq'"),
        ("gptq", {"groupsize": 64}, "did you mean 'group_size'"),
        ("gptq", {"bits": 5}, "2, 3, 4, 8"),
        ("gptq", {"group_size": 0}, "group_size"),
        ("awq", {"bits": 3}, "4"),
        ("nf4", {"block": 48}, "block"),
        ("ct-int8", {"group_size": 64}, "per row"),
        ("ct-float8", {"strategy": "row"}, "tensor, channel, block"),
        ("ct-packed", {"activations": "int8"}, "exact, fp8"),
        ("ct-packed", {"bits": 8, "activations": "fp8"}, "use ct-float8"),
    ],
)
def test_wrong_options_name_the_remedy(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build(name, options, "bfloat16")


def test_scales_that_overflow_are_refused() -> None:
    with pytest.raises(InputError, match="overflow float16"):
        Gptq().encode(torch.full((8, 128), 1e7))
    with pytest.raises(InputError, match="65504"):
        LlmInt8().encode(torch.full((8, 128), 1e5))


def test_kinds_do_not_mix() -> None:
    weight = torch.randn(64, 64)
    assert isinstance(Nf4().quantize(weight), CodebookWeight)
    with pytest.raises(CannotHold, match="integer grids"):
        Gptq().pack(Nf4().quantize(weight))
    with pytest.raises(CannotHold, match="nf4 table"):
        Nf4().pack(Gptq(group_size=64).quantize(weight))
