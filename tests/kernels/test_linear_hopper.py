"""The Hopper matmul: Gluon, which Triton's interpreter does not know, so on a GPU of that kind only."""

import itertools

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Awq, CtMxfp4, CtNvfp4, CtPacked, Format, Fp4, Gptq, Nf4
from quantkit.kernels.linear.weight_only import hopper
from quantkit.kernels.linear.weight_only.hopper import HopperConfig
from quantkit.kernels.linear.weight_only.hopper_shares import begin_of, next_place, place_of, program_of, shares
from quantkit.kernels.linear.weight_only.weight import lay_out
from quantkit.kernels.reference import linear as reference
from quantkit.kernels.reference.compare import LARGEST_ERROR, relative_error
from signed_scales import with_signs

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
    "mxfp4": CtMxfp4(),
    "nvfp4": CtNvfp4(),
}
CUTS = {
    "one-program-a-tile": HopperConfig(128, 4),
    "equal-shares": HopperConfig(256, 3, 0),
    "two-programs-a-tile": HopperConfig(128, 4, 2),
    "three-programs-a-tile": HopperConfig(64, 6, 3),
    "three-groups": HopperConfig(128, 4, 0, 192),
}


def assert_right(fmt: Format, outputs: int, x: Tensor, config: HopperConfig, *, bias: bool = False) -> None:
    torch.manual_seed(0)
    plain = (0.02 * torch.randn(outputs, x.shape[1], device="cuda") + 0.005).to(torch.bfloat16)
    quantized = with_signs(fmt.quantize(plain))
    addend = torch.randn(outputs, device="cuda").to(x.dtype) if bias else None
    out = torch.full((x.shape[0], outputs), float("nan"), device="cuda", dtype=x.dtype)
    weight = lay_out(quantized)
    assert hopper.matmul(x, weight, config, bias=addend, out=out) is out
    exact = reference.exact(x, fmt, quantized, addend)
    error = relative_error(out, exact)
    assert error < LARGEST_ERROR[str(x.dtype)[6:]]
    assert error < 2 * relative_error(reference.linear(x, fmt, quantized, addend), exact)
    assert torch.equal(hopper.matmul(x, weight, config, bias=addend), out)
    assert not weight.tickets.any()  # as the next call wants them


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_of_weight(name: str) -> None:
    inputs = 384 if "128" in name else 448
    x = torch.randn(300, inputs, device="cuda", dtype=torch.bfloat16)
    assert_right(FORMATS[name], 136, x, HopperConfig(splits=0), bias=name in ("w4g128", "nf4"))


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w4g128-asym", "w8g128", "nf4"])
@pytest.mark.parametrize("cut", CUTS)
def test_every_way_to_cut(name: str, cut: str) -> None:
    """More chunks than multiprocessors, in numbers that programs do not divide."""
    x = torch.randn(257, 1408, device="cuda", dtype=torch.bfloat16)
    assert_right(FORMATS[name], 1000, x, CUTS[cut], bias=True)


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129])
def test_any_number_of_tokens(tokens: int) -> None:
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.float16)
    if tokens:
        assert_right(FORMATS["w4g128"], 200, x, HopperConfig(128, 4))
    else:
        weight = lay_out(FORMATS["w4g128"].quantize(torch.randn(8, 256, device="cuda")))
        assert hopper.matmul(x, weight, HopperConfig(128, 4)).shape == (0, 8)


@needs_hopper
@pytest.mark.gpu
def test_rows_that_the_copy_engine_cannot_take() -> None:
    """A stride that 16 bytes do not divide: copied first."""
    x = torch.randn(5, 131, device="cuda", dtype=torch.bfloat16)[:, 1:129]
    assert_right(FORMATS["w4g128"], 64, x, HopperConfig(128, 4))


@needs_hopper
@pytest.mark.gpu
def test_more_programs_than_flags_are_refused() -> None:
    weight = lay_out(FORMATS["w4g128"].quantize(torch.randn(128, 256, device="cuda")))
    x = torch.randn(64 * 2000, 256, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(InputError, match="at most 2047 can"):
        hopper.matmul(x, weight, HopperConfig(64, 6, 2))


@pytest.mark.parametrize("processors", [1, 7, 132])
@pytest.mark.parametrize("splits", [0, 1, 2, 3])
@pytest.mark.parametrize(("across", "down", "chunks"), [(1, 1, 1), (1, 48, 32), (4, 48, 32), (3, 5, 7), (2, 3, 112)])
def test_shares_hold_every_chunk_once(across: int, down: int, chunks: int, splits: int, processors: int) -> None:
    """The kernel's own rules, run as plain Python: who begins where, and how many parts a finisher waits for."""
    share = shares(across * down, chunks, splits, processors)
    bounds = [begin_of.fn(program, share.per, share.extra) for program in range(share.programs + 1)]
    assert bounds[0] == 0
    assert bounds[-1] == across * down * chunks
    sizes = {end - begin for begin, end in itertools.pairwise(bounds)}
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 1

    parts = [0] * share.programs  # for each finisher
    place = (0, 0, 0)
    for program in range(share.programs):
        for unit in range(bounds[program], bounds[program + 1]):
            assert place_of.fn(unit, chunks, across) == place
            assert program_of.fn(unit, share.per, share.extra) == program
            if unit == bounds[program] and place[0] > 0:
                parts[program_of.fn(unit - place[0], share.per, share.extra)] += 1
            place = next_place.fn(*place, chunks, across)
    for program, count in enumerate(parts):
        last_tile = (bounds[program + 1] - 1) // chunks
        begins = last_tile * chunks >= bounds[program]
        waits = program_of.fn((last_tile + 1) * chunks - 1, share.per, share.extra) - program if begins else 0
        assert count == waits
    assert share.cut == any(parts)


def test_the_table_of_pairs_waits_for_no_other_warps() -> None:
    text = hopper.table_text("bf16", (0.5,) * 16, 32)
    assert "pairs[32768]" in text
    assert "st.shared" in text
    assert "bar" not in text


def test_elsewhere_it_is_refused() -> None:
    weight = lay_out(FORMATS["w4g128"].quantize(torch.randn(8, 128)))
    x = torch.randn(2, 128, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"compute capability 9\.0"):
        hopper.matmul(x, weight, HopperConfig())
    with pytest.raises(InputError, match="shape"):
        hopper.matmul(x[0], weight, HopperConfig())
