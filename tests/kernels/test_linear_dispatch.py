"""Which kernel is taken: from a measured table, from a related one, from defaults; and the op that hides it all."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CtFloat8, CtPacked, Format, LlmInt8, Nf4
from quantkit.kernels.card import KNOWN
from quantkit.kernels.linear import dispatch, op, tuning
from quantkit.kernels.linear.decoded import DecodedWeight
from quantkit.kernels.linear.dense import choices as dense
from quantkit.kernels.linear.dense.weight import BUCKETS as HALF_BUCKETS
from quantkit.kernels.linear.dispatch import choose, from_entry, to_entry
from quantkit.kernels.linear.eight_bit import choices as eight_bit_choices
from quantkit.kernels.linear.eight_bit import weight as eight_bit
from quantkit.kernels.linear.eight_bit.matmul import EightBitConfig
from quantkit.kernels.linear.fuse import join
from quantkit.kernels.linear.weight import CHUNK, Choice, Kernel, LinearWeight, Untuned, by_name, unmeasured
from quantkit.kernels.linear.weight_only import choices as weight_only
from quantkit.kernels.linear.weight_only.hopper import HopperConfig
from quantkit.kernels.linear.weight_only.skinny import SkinnyConfig
from quantkit.kernels.linear.weight_only.weight import PackedWeight, lay_out
from quantkit.kernels.reference import linear as reference
from quantkit.kernels.reference.compare import relative_error

pytestmark = pytest.mark.kernel

H100 = KNOWN["sm_90"]
ALL_KERNELS = {**weight_only.KERNELS, **eight_bit_choices.KERNELS, **dense.KERNELS}


def packed_weight(fmt: Format, outputs: int = 128, inputs: int = 256) -> PackedWeight:
    return lay_out(fmt.quantize(0.02 * torch.randn(outputs, inputs)))


def test_kinds() -> None:
    assert packed_weight(CtPacked(group_size=128)).kind == "int4-g128"
    assert packed_weight(CtPacked(group_size=-1, sym=False)).kind == "int4-row-zeros"
    assert packed_weight(Nf4()).kind == "nf4-g64-nested"
    fmt = CtFloat8(strategy="block")
    assert eight_bit.lay_out(fmt, fmt.quantize(torch.randn(16, 128))).kind == "fp8-block-blocks"


def test_measured_entry_comes_first() -> None:
    weight = packed_weight(CtPacked(group_size=128))
    measured = SkinnyConfig(128, 8, 4, 3, 2)
    table = {"int4-g128": {"128x256": {"8": ["skinny", *[128, 8, 4, 3, 2, False]], "1024": ["dequantize"]}}}
    assert choose(weight, 3, table).config == measured
    assert choose(weight, 5000, table).kernel == "dequantize"
    assert "measured" in choose(weight, 3, table).why
    asymmetric = packed_weight(CtPacked(group_size=128, sym=False))
    assert choose(asymmetric, 3, table).config == measured  # a relative's measurement
    assert "no measurement" in choose(weight, 30, table).why


@pytest.mark.parametrize("tokens", [0, 1, 8, 9, 100, 300, 4096])
def test_defaults_run_for_every_shape(tokens: int) -> None:
    weight = packed_weight(Nf4(), 96, 320)
    choice = choose(weight, tokens, {})
    assert choice.kernel == ("dequantize" if tokens > 256 else "skinny")
    fmt = LlmInt8()
    eight = eight_bit.lay_out(fmt, fmt.quantize(torch.randn(48, 320)))
    config = choose(eight, tokens, {}).config
    assert isinstance(config, EightBitConfig)
    assert eight.columns % config.depth == 0


def test_blocks_of_128_are_never_cut_across() -> None:
    fmt = CtFloat8(strategy="block")
    weight = eight_bit.lay_out(fmt, fmt.quantize(torch.randn(256, 512)))
    for tokens in dispatch.BUCKETS:
        config = weight.default(tokens, H100).config
        assert isinstance(config, EightBitConfig)
        assert config.depth == 128


def test_entries_come_back_as_they_were() -> None:
    for choice in (
        Choice("skinny", SkinnyConfig(32, 8, 2, 3, 4, True), "x"),
        Choice("eight_bit", EightBitConfig(64, 16, 256, 4, 3, 2), "x"),
        Choice("hopper", HopperConfig(128, 4), "x"),
        Choice("scaled_mm", None, "x"),
    ):
        assert from_entry(json.loads(json.dumps(to_entry(choice))), ALL_KERNELS, "x") == choice


def test_the_shipped_table_can_be_read() -> None:
    table = dispatch.table_of("nvidia-h200")
    assert {"int4-g128", "nf4-g64-nested", "int8-outliers", "int8-token", "fp8-token"} <= set(table)
    for shapes in table.values():
        for buckets in shapes.values():
            known = sorted({*dispatch.BUCKETS, *HALF_BUCKETS})
            assert list(buckets) == [str(most) for most in known if str(most) in buckets]  # in order
            for entry in buckets.values():
                from_entry(entry, ALL_KERNELS, "")


def test_what_a_kind_lacks_it_borrows() -> None:
    """Measurements of a relative serve; for very many tokens nobody asks a table."""
    measured = {"256x256": {"8": ["skinny", 32, 8, 2, 3, 1, False], "1024": ["hopper", 256, 3]}}
    for bits, relative in ((4, "int4-g128"), (3, "int3-g128"), (2, "int2-g64-zeros")):
        weight = lay_out(CtPacked(bits=bits, group_size=64).quantize(torch.randn(256, 256)))
        table = {relative: measured}
        assert dispatch.choose(weight, 8, table).kernel == "skinny"
        assert dispatch.choose(weight, 1000, table).kernel == "hopper"
        assert dispatch.choose(weight, 5000, table).kernel == "dequantize"


def test_the_shipped_table_has_what_kinds_borrow_from() -> None:
    table = dispatch.table_of("nvidia-h200")
    for fmt in (CtPacked(bits=2, group_size=32), CtPacked(bits=3, group_size=64), CtPacked(group_size=256), Nf4()):
        assert set(lay_out(fmt.quantize(torch.randn(256, 256))).relatives) <= set(table)


def paper_weight(kind: str, shape: str) -> Any:
    """What a default looks at."""
    outputs, inputs = map(int, shape.split("x"))
    sizes = {"outputs": outputs, "rows": outputs, "inputs": inputs, "chunks": inputs // CHUNK}
    return SimpleNamespace(**sizes, nbytes=outputs * inputs // 2, code_type=kind.split("-")[0], kind=kind, table=None)


@pytest.mark.parametrize("most", [128, 256])
def test_defaults_on_hopper_are_the_kernels_that_won_there(most: int) -> None:
    """For the shapes of the table, as if nobody had measured them; small products cannot be cut for a whole GPU."""

    def default(kind: str, shape: str) -> Choice:
        return weight_only.default(paper_weight(kind, shape), most, H100)

    table = dispatch.table_of("nvidia-h200")
    packed = [
        kind for kind in table if any(entry.get(str(most), [""])[0] == "hopper" for entry in table[kind].values())
    ]
    assert len(packed) == 10
    for kind in packed:
        for shape in table[kind]:
            assert default(kind, shape).kernel == table[kind][shape][str(most)][0], (kind, shape)
    assert default("int4-g128", "28672x4096").config.outputs == (192 if most == 128 else 128)
    assert default("int8-g128", "28672x4096").config.outputs == 128
    assert default("int4-g128", "512x256").kernel == "skinny"


@pytest.mark.parametrize(
    ("code", "shape", "expected"),
    [
        ("int4", "28672x4096", HopperConfig(64, 6, 0, 192)),
        ("int4", "5120x5120", HopperConfig(64, 6, 0)),
        ("int4", "2048x1024", None),
        ("int3", "5120x5120", None),
        ("int8", "28672x4096", None),
    ],
)
def test_defaults_on_hopper_for_64_tokens(code: str, shape: str, expected: HopperConfig | None) -> None:
    found = weight_only.default(paper_weight(f"{code}-g128", shape), 64, H100)
    assert found.config == expected if expected else found.kernel == "skinny"


def test_three_bits_never_get_tiles_of_8_tokens() -> None:
    weight = lay_out(CtPacked(bits=3).quantize(torch.randn(256, 256)))
    config = weight.default(8, H100).config
    assert isinstance(config, SkinnyConfig)
    assert config.tokens == 16


def test_tables_are_merged(tmp_path: Path) -> None:
    file = tmp_path / "deeper" / "gpu.json"
    tuning.save({"a": {"1x1": {"8": ["dequantize"]}}}, file)
    tuning.save({"a": {"2x2": {"8": ["dequantize"]}, "1x1": {"16": ["hopper", 256, 3]}}}, file)
    expected = {"1x1": {"8": ["dequantize"], "16": ["hopper", 256, 3]}, "2x2": {"8": ["dequantize"]}}
    assert json.loads(file.read_text()) == {"a": expected}


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    file.write_text("{")
    with pytest.raises(InputError, match="is not a table of kernels"):
        dispatch.read_table(file)


@pytest.mark.gpu
def test_tuning_measures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    dispatch.table_of.cache_clear()
    fmt = CtPacked(group_size=128)
    quantized = fmt.quantize(0.02 * torch.randn(128, 256, device="cuda"))
    weight = lay_out(quantized)
    lines: list[str] = []

    def expected(x: torch.Tensor) -> torch.Tensor:
        return reference.linear(x, fmt, quantized)

    try:
        assert tuning.tune_once(weight, expected, progress=lines.append)
        assert not tuning.tune_once(weight, expected)
        assert not any("wrong" in line for line in lines)
        assert choose(weight, 1).why == "measured for int4-g128 128x256 at 8 tokens"
    finally:
        dispatch.table_of.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["channel", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_tokens_of_fp8_in_either_dtype(strategy: str, dtype: torch.dtype) -> None:
    """Where torch's own kernel, which takes bfloat16 alone, was the fastest."""
    fmt = CtFloat8(strategy=strategy)
    quantized = fmt.quantize(0.02 * torch.randn(512, 512, device="cuda"))
    weight = op.prepare(fmt, quantized, dtype)
    x = torch.randn(300, 512, device="cuda", dtype=dtype)
    table = {weight.kind: {"512x512": {"512": ["scaled_mm"]}}}
    choice = choose(weight, 300, table, dtype=dtype)
    assert (choice.kernel == "scaled_mm") == (dtype == torch.bfloat16)
    right = reference.linear(x, fmt, quantized)
    assert relative_error(op.run(choice, x, weight), right) < 1e-2
    assert relative_error(op.linear(x, weight), right) < 1e-2


def test_candidates_fit_the_weight() -> None:
    weight = packed_weight(CtPacked(group_size=128), 128, 1024)
    for most in dispatch.BUCKETS:
        found = list(weight.candidates(most))
        assert found
        assert {choice.kernel for choice in found} == {"skinny"} | ({"dequantize"} if most >= 128 else set())
        assert all(weight.rows % choice.config.outputs == 0 for choice in found if choice.config is not None)


@dataclass(frozen=True)
class ToyConfig:
    factor: int


def multiplied(
    x: Tensor, weight: "ToyWeight", config: ToyConfig, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    return x @ weight.values.mT * config.factor


@dataclass(frozen=True)
class ToyWeight(Untuned):
    """A room from outside: it stands in tables under a kind of its own, with a kernel of its own."""

    values: Tensor
    outputs: int = 2
    inputs: int = 3
    nbytes: int = 24
    kind: str = "toy"
    relatives: tuple[str, ...] = ("toy-relative",)
    buckets: tuple[int, ...] = (4, 16)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        return by_name(Kernel("times", multiplied, ToyConfig, supports=lambda weight, dtype: dtype == torch.float32))

    def bucket(self, tokens: int) -> int | None:
        return dispatch.bucket_of(tokens, self.buckets) if tokens <= 16 else None

    def default(self, tokens: int, processors: int, dtype: torch.dtype = torch.bfloat16) -> Choice:
        return Choice("times", ToyConfig(1), unmeasured(self))


def test_a_weight_class_of_another_room_needs_no_edit() -> None:
    weight: LinearWeight = ToyWeight(torch.ones(2, 3))
    table = {"toy": {"2x3": {"4": ["times", 5]}}, "toy-relative": {"2x3": {"16": ["times", 7]}}}
    found = [choose(weight, tokens, table, dtype=torch.float32).config.factor for tokens in (3, 9, 17)]
    assert found == [5, 7, 1]  # its own kind, its relative, its default
    assert choose(weight, 3, table).config.factor == 1  # the kernel does not take bfloat16
    x = torch.ones(4, 3)
    assert torch.equal(op.run(choose(weight, 4, table, dtype=x.dtype), x, weight), torch.full((4, 2), 15.0))
    assert torch.equal(op.linear(x, weight), torch.full((4, 2), 3.0))
    assert op.explain(weight, 99) == "times ToyConfig(factor=1): no measurement of toy 2x3 on this GPU"
    assert join([weight, weight]) is None
    assert not tuning.tune_once(op.prepare(Nf4(), Nf4().quantize(torch.randn(8, 64))), lambda x: x)  # of a CPU


def test_the_op_on_any_device(device: str) -> None:
    for fmt in (CtPacked(group_size=64), Nf4(), LlmInt8(), CtFloat8()):
        torch.manual_seed(0)
        quantized = fmt.quantize((0.02 * torch.randn(96, 192)).to(device))
        weight = op.prepare(fmt, quantized)
        for tokens in (1, 20, 300):
            x = torch.randn(tokens, 192, device=device, dtype=torch.bfloat16)
            bias = torch.randn(96, device=device, dtype=torch.bfloat16)
            assert relative_error(op.linear(x, weight, bias), reference.exact(x, fmt, quantized, bias)) < 5e-3
            assert ":" in op.explain(weight, tokens)


def test_what_no_kernel_takes_is_decoded(device: str) -> None:
    fmt = Nf4(block=64)
    quantized = fmt.quantize(torch.randn(8, 96, device=device))  # blocks reach across rows
    weight = op.prepare(fmt, quantized)
    assert isinstance(weight, DecodedWeight)
    x = torch.randn(2, 96, device=device, dtype=torch.bfloat16)
    out = torch.empty(2, 8, device=device, dtype=torch.bfloat16)
    assert op.linear(x, weight, out=out) is out
    assert relative_error(out, reference.exact(x, fmt, quantized)) < 5e-3
    assert op.explain(weight, 1).startswith("decode and multiply: ")
    with pytest.raises(InputError, match=r"must be \[any, 96\]"):
        op.linear(x[:, :5], weight)
    with pytest.raises(InputError, match="float64"):
        op.linear(x.double(), weight)
