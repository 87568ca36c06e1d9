"""Folding input scales into the module before changes nothing, for every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.arch import FAMILIES, LLAMA, QWEN3, Family
from quantkit.blocks import BlockPart, parts_of
from quantkit.checkpoint import Checkpoint
from quantkit.formats import CtPacked, IntegerWeight
from quantkit.methods.awq import AwqMethod
from quantkit.methods.statistics import InputStatistics
from quantkit.passes.folding import (
    column_scales,
    divide_bias,
    divide_norm,
    divide_outputs,
    producer_scales,
    tied_heads,
)
from quantkit.passes.group import BlockQuantizer
from quantkit.stages import Stage
from tiny_models import WITH_EXPERTS

TOKENS = torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(5))
FORMAT = CtPacked(bits=3, group_size=32, dtype="float32")
BIASED = {"attention_bias": True, "mlp_bias": True}
ONE_EACH = {"num_key_value_heads": 4}

# Of those with experts, tests/quantkit/test_arch.py has the folds and tests/quantkit/mixed_layers the scaling.
MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    name: (family, {}) for name, family in FAMILIES.items() if name not in WITH_EXPERTS
}
MODELS |= {"llama biased": (LLAMA, BIASED), "qwen3 biased": (QWEN3, BIASED), "llama no gqa": (LLAMA, ONE_EACH)}

every_model = pytest.mark.parametrize(("family", "changes"), MODELS.values(), ids=MODELS)
Saver = Callable[..., Any]


def quantizer(source: Checkpoint, family: Family, layer: int) -> BlockQuantizer:
    chosen = dict.fromkeys(family.linears(source.config), FORMAT)
    method = AwqMethod(points=4, clip=False)  # on plain ranges scales gain more: they are far from 1
    return BlockQuantizer(source, family, chosen, method, layer, lambda _: None)


def statistics(inputs: int, seed: int) -> InputStatistics:
    """Inputs with columns that matter most, at the same place in every head: scales far from 1 gain."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.rand(inputs, generator=generator) + 0.5
    columns[3::8] *= 40
    found = InputStatistics(inputs)
    found.add(torch.randn(200, inputs, generator=generator) * columns)
    return found


def nothing_seen(inputs: int) -> InputStatistics:
    """No scale gains anything here: the layer is plainly rounded, and the one before it left alone."""
    found = InputStatistics(inputs)
    found.add(torch.zeros(1, inputs))
    return found


def width(part: BlockPart, stage: Stage) -> int:
    return int(part.block.get_parameter(f"{stage.names[0]}.weight").shape[1])


@torch.no_grad()
def scale(work: BlockQuantizer, part: BlockPart, stage: Stage, seed: int) -> None:
    """What `BlockQuantizer.quantize` does before it rounds."""
    linears = [part.block.get_submodule(name) for name in stage.names]
    weights = [linear.get_parameter("weight").detach() for linear in linears]
    divisor, notes = work._scale(part.block, stage, weights, FORMAT, statistics(width(part, stage), seed))
    assert divisor is not None, notes
    for weight in weights:
        weight *= divisor
    assert float(divisor.max() / divisor.min()) > 2


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(TOKENS, use_cache=False).logits
    return found


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@every_model
def test_scales_change_nothing(family: Family, changes: dict[str, Any], save_model: Saver, tmp_path: Path) -> None:
    model = save_model(family, tmp_path, **changes)
    source = Checkpoint(tmp_path)
    before = logits(model)
    for layer, block in enumerate(model.get_submodule(family.blocks)):
        original = {name: tensor.clone() for name, tensor in block.state_dict().items()}
        work = quantizer(source, family, layer)
        for part in parts_of(block, family.stages(layer, source.config), {}):
            first, last = part.stages
            scale(work, part, first, seed=layer)
            scale(work, part, last, seed=layer + 10)
        assert_reported(work, block, family, layer, original)
    assert_same(logits(model), before)


def assert_reported(
    work: BlockQuantizer, block: nn.Module, family: Family, layer: int, original: dict[str, Tensor]
) -> None:
    """What changed and will not be written as a quantized layer is in the result, as it is in the block."""
    found = work.result(block).changed
    consumers = {f"{name}.weight" for stage in family.stages(layer, {}) for name in stage.linears}
    for name, tensor in block.state_dict().items():
        full = f"{family.blocks}.{layer}.{name}"
        if name not in consumers:
            assert (full in found) == (not torch.equal(tensor, original[name])), name
        if full in found:
            assert torch.equal(found[full], tensor)


@every_model
def test_rounded_layers_take_scales_too(
    family: Family, changes: dict[str, Any], save_model: Saver, tmp_path: Path
) -> None:
    """Value and up layers are rounded before the layers behind them choose scales."""
    model = save_model(family, tmp_path, **changes)
    source = Checkpoint(tmp_path)
    blocks = model.get_submodule(family.blocks)
    works = [quantizer(source, family, layer) for layer in range(len(blocks))]
    every = [parts_of(block, family.stages(0, source.config), {}) for block in blocks]
    with torch.no_grad():
        for work, parts in zip(works, every, strict=True):
            for part in parts:
                first = part.stages[0]
                assert work.quantize(part.block, first, nothing_seen(width(part, first))) is None
    rounded = logits(model)
    for layer, (work, parts) in enumerate(zip(works, every, strict=True)):
        codes = {layer.module: layer.quantized for layer in work.result(blocks[layer]).layers}
        for part in parts:
            scale(work, part, part.stages[-1], seed=layer)
        assert_codes_kept(work, blocks[layer], codes)
    assert_same(logits(model), rounded)


def assert_codes_kept(work: BlockQuantizer, block: nn.Module, before: dict[str, Any]) -> None:
    """Only scales changed; the block holds the decoded weight of every rounded layer."""
    changed = 0
    for layer in work.result(block).layers:
        old, new = before[layer.module], layer.quantized
        assert isinstance(new, IntegerWeight)
        assert torch.equal(new.codes, old.codes)
        assert torch.equal(new.zeros, old.zeros)
        changed += not torch.equal(new.scales, old.scales)
        name = layer.module.split(".", 3)[3]
        assert torch.equal(block.get_parameter(f"{name}.weight").detach(), new.dequantize())
    assert changed == 2


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_dividing_codes_equals_rounding_the_divided_weight(bits: int, sym: bool) -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    divisors = torch.rand(32, generator=torch.Generator().manual_seed(2)) * 4 + 0.1
    exact = CtPacked(bits=bits, group_size=32, sym=sym, dtype="float32")
    divided, expected = exact.quantize(weight).divide_rows(divisors), exact.quantize(weight / divisors[:, None])
    steps = (weight / divided.scales.repeat_interleave(32, 1) / divisors[:, None]).abs()
    tie = (steps.frac() - 0.5).abs() < 1e-3  # such as the largest weight of a symmetric group
    assert torch.equal(divided.codes[~tie], expected.codes[~tie])
    assert torch.allclose(divided.scales, expected.scales, rtol=1e-6)
    powers = torch.exp2(torch.arange(32) % 5 - 2.0)  # 16-bit scales divide by these without rounding
    fmt = CtPacked(bits=bits, group_size=32, sym=sym, dtype="bfloat16")
    divided, expected = fmt.quantize(weight).divide_rows(powers), fmt.quantize(weight / powers[:, None])
    assert torch.equal(divided.codes, expected.codes)
    assert torch.equal(divided.zeros, expected.zeros)
    assert torch.equal(divided.scales, expected.scales)


@pytest.mark.parametrize("queries", [1, 2, 4])
def test_tied_heads_match_how_attention_repeats_values(queries: int) -> None:
    """Every query head reads the value head that `repeat_interleave` puts in its place."""
    values, head = 3, 4
    tie = tied_heads(values * head, values * queries * head, head)
    scales = tie(torch.rand(values * queries * head) + 0.1)
    rows = producer_scales(scales, values * head, head)
    repeated = rows.view(values, head).repeat_interleave(queries, 0).flatten()
    assert torch.equal(repeated, scales)
    assert torch.equal(column_scales(rows, len(scales), head), scales)
    assert torch.allclose(tie(scales), scales)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_takes_exactly_the_scales_that_it_says(offset: float, dtype: torch.dtype) -> None:
    """What rounding the norm's weight changes is in the returned scales, so that nothing is lost."""
    norm = nn.LayerNorm(512)
    norm.weight.data = (torch.rand(512) + 0.2 - offset).to(dtype).float()
    effective = norm.weight.detach() + offset
    wanted = 10 ** (torch.rand(512) * 8 - 4)
    taken = divide_norm(norm, wanted, offset, dtype)
    assert torch.equal(norm.weight.detach().to(dtype).float(), norm.weight.detach())
    assert torch.allclose((norm.weight.detach() + offset) * taken, effective, rtol=1e-6)
    near = wanted < 10
    assert torch.allclose(taken[near], wanted[near], rtol=0.2)


def test_zeros_in_a_norm_stay_zero() -> None:
    norm = nn.LayerNorm(4)
    norm.weight.data = torch.tensor([1.0, 0.0, 2.0, 0.0])
    taken = divide_norm(norm, torch.tensor([2.0, 2.0, 0.5, 0.5]), 0.0, torch.bfloat16)
    assert torch.equal(norm.weight.detach(), torch.tensor([0.5, 0.0, 4.0, 0.0]))
    assert torch.equal(taken, torch.tensor([2.0, 1.0, 0.5, 1.0]))


def test_only_the_last_outputs_are_divided() -> None:
    linear = nn.Linear(8, 6)
    weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
    scales = torch.tensor([2.0, 4.0])
    assert torch.equal(divide_outputs(linear, scales, torch.float32), scales)
    assert divide_bias(linear, scales, torch.float32)
    assert torch.equal(linear.weight[:4], weight[:4])
    assert torch.equal(linear.weight[4:], weight[4:] / scales[:, None])
    assert torch.equal(linear.bias, torch.cat([bias[:4], bias[4:] / scales]))
    divide_outputs(linear, torch.tensor([3.0]), torch.bfloat16)
    assert torch.equal(linear.weight[5], (weight[5] / 4 / 3).bfloat16().float())
    assert not divide_bias(nn.Linear(8, 6, bias=False), scales, torch.float32)


def test_every_family_folds_every_stage() -> None:
    """A norm that a router reads takes no scales without it; values made from latents and a clipped up take none."""
    for family in FAMILIES.values():
        stages = family.stages(3, {"num_experts_per_tok": 2})
        unfolded = {"output"} if family.latent else {"down"} if family.clipped else set()
        assert {stage.role for stage in stages if stage.fold is None} == unfolded
        for stage in stages:
            if stage.experts is not None and stage.fold is not None and stage.fold.kind == "norm":
                assert stage.experts.router in stage.fold.also
