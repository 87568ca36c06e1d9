"""Folded scales: what is stored stays in the normal numbers, and the layer after takes the ratio that was stored."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from quantkit.arch import LLAMA
from quantkit.blocks import BlockPart, parts_of
from quantkit.checkpoint import Checkpoint
from quantkit.formats import CtPacked, Format, Gguf, Gptq
from quantkit.methods.method import Method, Rounded, ScaleChoice, Tie
from quantkit.methods.statistics import InputStatistics
from quantkit.passes.folding import divide_outputs
from quantkit.passes.group import BlockQuantizer
from quantkit.passes.scale_limits import Limits, column_limits, norm_limits, row_limits

TINY, TOP = torch.finfo(torch.float16).tiny, torch.finfo(torch.float16).max
HALF = Gptq(bits=4, group_size=32, dtype="float16")


@dataclass(frozen=True, eq=False)
class Given(Method):
    """Rounds plainly, and takes the scales that a test says; remembers the weights that it was asked to round."""

    name: ClassVar[str] = "given"
    scales: list[Tensor]  # of one choice after the other
    seen: list[Tensor] = field(default_factory=list)

    @property
    def scales_inputs(self) -> bool:
        return True

    def choose_scales(self, weight: Tensor, fmt: Format, inputs: InputStatistics, tie: Tie) -> ScaleChoice:
        return ScaleChoice(tie(self.scales.pop(0)), 0.0, 1.0)

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        self.seen.append(weight.clone())
        return Rounded(fmt.quantize(weight))


def wide(count: int) -> Tensor:
    """Scales from 1e-4 to 1e4, as far as methods search."""
    return 10 ** (torch.rand(count, generator=torch.Generator().manual_seed(1)) * 8 - 4)


def read(part: BlockPart, name: str) -> InputStatistics:
    found = InputStatistics(part.block.get_parameter(f"{name}.weight").shape[1])
    found.add(torch.randn(50, found.absmax.numel()))
    return found


def first_block(model: Any, source: Checkpoint) -> tuple[BlockPart, ...]:
    return parts_of(model.get_submodule(LLAMA.blocks)[0], LLAMA.stages(0, source.config), {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_and_rows_stay_normal_numbers(dtype: torch.dtype) -> None:
    kind = torch.finfo(dtype)
    norm, linear = nn.RMSNorm(256), nn.Linear(64, 256, bias=False)
    norm.weight.data = 10 ** (torch.rand(256) * 4 - 3)
    for limits, before in (
        (norm_limits(norm, 0.0, dtype), norm.weight.detach()),
        (row_limits(linear, dtype), linear.weight.detach().square().mean(1).sqrt()),
    ):
        scales = limits.within(limits).clamp(wide(256), 1)
        after = before / scales
        assert float(after.min()) >= kind.tiny * 0.999
        assert float(after.max()) <= kind.max
        assert torch.equal(limits.clamp(torch.ones(256), 1), torch.ones(256))


def test_a_norm_with_an_offset_and_zeros_has_no_least_number() -> None:
    norm = nn.RMSNorm(4)
    norm.weight.data = torch.tensor([0.0, -1.0, 1.0, 0.5])
    assert bool(norm_limits(norm, 1.0, torch.float16).high.isinf().all())
    assert norm_limits(norm, 0.0, torch.float16).high.isinf().tolist() == [True, False, False, False]


def test_columns_neither_overflow_nor_vanish() -> None:
    weight = torch.randn(16, 64) * 10 ** torch.linspace(-6, 4, 64)
    limits = column_limits([weight], HALF)
    limits = limits.within(limits)
    for scales in (limits.low, limits.high, limits.clamp(wide(64), 1)):
        stored = HALF.quantize(weight * scales).scales  # raises where steps overflow
        assert bool(stored.isfinite().all())
    grown = column_limits([weight * 0.01], HALF).high
    assert torch.allclose(grown, column_limits([weight], HALF).high * 100)


def test_limits_of_heads_that_share_values_are_the_tightest() -> None:
    limits = Limits(torch.arange(12.0) / 12, torch.arange(12.0) + 2).of_rows(6, 3)
    assert torch.allclose(limits.low, torch.tensor([3.0, 4, 5, 9, 10, 11]) / 12)
    assert torch.equal(limits.high, torch.tensor([2.0, 3, 4, 8, 9, 10]))
    shared = limits.clamp(torch.full((12,), 100.0), 3)
    assert torch.equal(shared.view(2, 2, 3)[:, 0], shared.view(2, 2, 3)[:, 1])


@pytest.mark.parametrize("fmt", [HALF, CtPacked(bits=4, group_size=32, dtype="bfloat16"), Gguf("Q4_0")], ids=str)
def test_a_layer_takes_the_ratio_that_the_one_before_really_has(fmt: Format, save_model: Any, tmp_path: Path) -> None:
    """Under scales far from 1, also where heads share values: products of rows and columns are what they were."""
    model = save_model(LLAMA, tmp_path, hidden_size=64, intermediate_size=64, num_key_value_heads=2)
    source = Checkpoint(tmp_path)
    method = Given([torch.ones(64), wide(64)] * 2)
    work = BlockQuantizer(source, LLAMA, dict.fromkeys(LLAMA.linears(source.config), fmt), method, 0, lambda _: None)
    attention, mlp = first_block(model, source)
    for part, producer in ((attention, "self_attn.v_proj"), (mlp, "mlp.up_proj")):
        first, last = part.stages
        with torch.no_grad():
            work.quantize(part.block, first, read(part, first.names[0]))
            before = part.block.get_parameter(f"{producer}.weight").clone()
            columns = part.block.get_parameter(f"{last.names[0]}.weight").clone()
            divisor = work.quantize(part.block, last, read(part, last.names[0]))
            after = part.block.get_parameter(f"{producer}.weight").detach()
        assert divisor is not None
        assert torch.equal(method.seen[-1], columns * divisor)
        head = 16 if producer.endswith("v_proj") else 1
        rows = divisor.view(-1, len(divisor) // len(after), head)[:, 0].flatten()
        assert float(rows.max() / rows.min()) > 100
        error = (after * rows[:, None] - before).norm(dim=1) / before.norm(dim=1)
        assert float(error.max()) < 0.005
        # No other ratio brings the stored rows nearer: what is left of the error is at right angles to them.
        left = ((after * rows[:, None] - before) * after).sum(1) / after.norm(dim=1) / before.norm(dim=1)
        assert float(left.abs().max()) < 1e-6


def test_a_plain_layer_says_what_16_bits_made_of_its_rows() -> None:
    linear = nn.Linear(4, 2, bias=False)
    linear.weight.data = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    taken = divide_outputs(linear, torch.tensor([3.0, 7.0]), torch.bfloat16)
    assert torch.equal(taken, torch.tensor([1.0, 1.0]) / linear.weight.detach()[:, 0])
    assert not torch.equal(taken, torch.tensor([3.0, 7.0]))


def test_scaled_weights_are_rounded_from_float32(save_model: Any, tmp_path: Path) -> None:
    """A block in bfloat16 would round the scaled weights once more."""
    model = save_model(LLAMA, tmp_path, hidden_size=64, intermediate_size=64).bfloat16()
    source = Checkpoint(tmp_path)
    fmt = CtPacked(bits=4, group_size=32, dtype="bfloat16")
    method = Given([torch.linspace(0.3, 3.0, 64)])
    work = BlockQuantizer(source, LLAMA, dict.fromkeys(LLAMA.linears(source.config), fmt), method, 0, lambda _: None)
    attention, _ = first_block(model, source)
    stage = attention.stages[0]
    weights = torch.cat([attention.block.get_parameter(f"{name}.weight") for name in stage.names]).detach().float()
    with torch.no_grad():
        divisor = work.quantize(attention.block, stage, read(attention, stage.names[0]))
    assert divisor is not None
    assert torch.equal(method.seen[0], weights * divisor)
    assert not torch.equal(method.seen[0], method.seen[0].bfloat16().float())
