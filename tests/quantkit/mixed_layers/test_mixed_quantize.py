"""Quantizing layers that differ: each expert by the tokens that its router sends, stages in their order."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quantkit.arch import Family
from quantkit.blocks import BlockPart, BlockRunner, run_block
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.divergence import token_divergence
from quantkit.formats import CtPacked, Gptq, IntegerWeight
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.awq import AwqMethod
from quantkit.methods.gptq import GptqMethod, quantize_layer
from quantkit.methods.rtn import RtnMethod
from quantkit.methods.statistics import InputStatistics
from quantkit.passes import CalibratedPass
from quantkit.passes.activations import Activations
from quantkit.passes.experts import ExpertRounding
from quantkit.passes.sensitivity import SCORED, SensitivityPass
from quantkit.passes.stage_inputs import stage_statistics
from quantkit.provenance import QUANTIZATION_LOG

pytestmark = pytest.mark.usefixtures("few_scales")

LAYERS, EXPERTS, CHOSEN = 3, 4, 2
FEW = Calibration(samples=6, seq_len=32)  # of `quantized`
UNREACHED_EXPERT = "model.layers.2.mlp.experts.3."
Quantized = Callable[[str], tuple[Path, Any]]


def codes(quantized: Any) -> Tensor:
    assert isinstance(quantized, IntegerWeight)
    return quantized.codes


def linears_of(model: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head" and not name.endswith("router"):
            yield name


def test_stages_name_every_linear_and_the_router(source: Path, family: Family, model: Any) -> None:
    config = Checkpoint(source).config
    assert sorted(family.linears(config)) == sorted(linears_of(model))
    by_layer = family.linears_by_stage(config)
    assert [[len(modules) for modules in layer] for layer in by_layer] == [[3, 1, 1, 2, 1]] + 2 * [[3, 1, 1, 8, 4]]
    for layer in range(LAYERS):
        for stage in family.stages(layer, config):
            assert (stage.experts is not None) == (layer > 0 and stage.part.kind == "mlp")
            if stage.experts is not None:
                router = model.model.layers[layer].get_submodule(stage.experts.router)
                assert (router.out_features, stage.experts.per_token) == (stage.experts.count, CHOSEN)


@torch.no_grad()
def test_block_by_block_equals_whole(source: Path, family: Family, model: Any, tokens: Tensor) -> None:
    runner = BlockRunner(Checkpoint(source), family)
    hidden = runner.embed(tokens)
    for layer, arguments in enumerate(runner.arguments(tokens.shape[1])):
        hidden = run_block(runner.load(layer, arguments), hidden)
    assert torch.allclose(model.model.norm(hidden), model.model(tokens), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_expert_sees_the_tokens_that_its_router_sends(source: Path, family: Family) -> None:
    torch.manual_seed(1)
    runner = BlockRunner(Checkpoint(source), family)
    for layer in (1, 2):
        _, part = runner.load(layer, runner.arguments(24)[layer])
        gate_up, down = part.stages
        assert part.closing is None
        hidden = torch.randn(2, 24, 64)
        normed = part.block.get_submodule("post_attention_layernorm")(hidden).flatten(0, 1)
        mlp = part.block.get_submodule("mlp")
        chosen = mlp.get_submodule("router")(normed).topk(CHOSEN).indices
        found = stage_statistics(part, gate_up, [part.inputs(gate_up, batch) for batch in hidden.split(1)])
        inner = stage_statistics(part, down, [part.inputs(down, batch) for batch in hidden.split(1)])
        for number in range(EXPERTS):
            routed = normed[(chosen == number).any(1)]
            assert found[number].tokens == inner[number].tokens == len(routed)
            torch.testing.assert_close(found[number].hessian, routed.T @ routed, rtol=1e-4, atol=1e-4)
            expert = mlp.get_submodule(f"experts.{number}")
            between = functional.silu(expert.gate_proj(routed)) * expert.up_proj(routed)  # type: ignore[operator]
            torch.testing.assert_close(inner[number].hessian, between.T @ between, rtol=1e-4, atol=1e-4)
        assert sum(each.tokens for each in found) == CHOSEN * 48
        assert (found[3].tokens == 0) == (layer == 2)


def test_plain_rounding_rounds_every_linear_by_itself(quantized: Quantized, model: Any) -> None:
    folder, report = quantized("rtn-w4g32")
    checkpoint, fmt = Checkpoint(folder), Gptq(bits=4, group_size=32)
    assert report.warnings == []
    assert set(checkpoint.formats) == set(linears_of(model))
    for name in linears_of(model):
        weight = model.get_parameter(f"{name}.weight").detach()
        assert torch.equal(codes(checkpoint.quantized(name)), codes(fmt.quantize(weight)))


@torch.no_grad()
def test_gptq_rounds_an_expert_by_its_own_tokens(
    quantized: Quantized, family: Family, model: Any, tokens: Tensor
) -> None:
    """The direct way: the model with everything before the experts of layer 1 quantized, and a hook on each expert."""
    folder, _ = quantized("gptq-w4g32")
    checkpoint, fmt = Checkpoint(folder), Gptq(bits=4, group_size=32)
    for name in family.linears(checkpoint.config):
        if name.startswith(("model.layers.0.", "model.layers.1.self_attn.")):
            model.get_parameter(f"{name}.weight").copy_(checkpoint.weight(name, torch.float32))
    experts = model.model.layers[1].mlp.experts
    seen, pool = [InputStatistics(64) for _ in experts], InputStatistics(64)
    for expert, statistics in zip(experts, seen, strict=True):
        expert.register_forward_pre_hook(lambda _, inputs, to=statistics: to.add(inputs[0]))
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, inputs: pool.add(inputs[0]))
    with fast_products(torch.device("cpu")):
        model(tokens)
    assert sum(each.tokens for each in seen) == CHOSEN * tokens.numel()
    for number, (expert, statistics) in enumerate(zip(experts, seen, strict=True)):
        statistics.lean_on(pool)
        weight = torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
        direct = codes(quantize_layer(weight, fmt, statistics.require_hessian(), GptqMethod()).quantized)
        names = [f"model.layers.1.mlp.experts.{number}.{linear}" for linear in ("gate_proj", "up_proj")]
        found = torch.cat([codes(checkpoint.quantized(name)) for name in names])
        assert float((found == direct).float().mean()) > 0.999  # sums of floats in another order
        plain = codes(fmt.quantize(weight))
        assert float((found == plain).float().mean()) < 0.95


@pytest.mark.parametrize("recipe", ["gptq-w4g32", "awq-w4g32", "fp8-static"])
def test_an_expert_without_tokens_is_rounded_by_those_of_its_block(
    recipe: str, quantized: Quantized, family: Family
) -> None:
    """It is said, counted, and in log and card."""
    folder, report = quantized(recipe)
    (warning,) = report.warnings
    assert warning.startswith("1 of 8 experts were reached by too few calibration tokens (1 by none)")
    assert UNREACHED_EXPERT.removesuffix(".") in warning
    logs = {layer.module: layer.log for layer in report.layers}
    for linear in ("gate_proj", "up_proj", "down_proj"):
        log = logs[UNREACHED_EXPERT + linear]
        assert (log["expert_tokens"], log["pooled_tokens"]) == (0, FEW.samples * FEW.seq_len)
    for layer in (1, 2):
        sent = [
            logs[f"model.layers.{layer}.mlp.experts.{number}.up_proj"]["expert_tokens"] for number in range(EXPERTS)
        ]
        assert sum(sent) == CHOSEN * FEW.samples * FEW.seq_len
    assert sum("pooled_tokens" in log for log in logs.values()) == 3
    assert [layer.module for layer in report.layers] == family.linears(Checkpoint(folder).config)
    said = "8; calibration tokens that reached one: least 0, median "
    assert said in (folder / "README.md").read_text()
    assert said in json.loads((folder / QUANTIZATION_LOG).read_text().splitlines()[0])["experts"]


def test_an_expert_without_tokens_has_an_input_scale(quantized: Quantized) -> None:
    """Of 0 it would be silent for the tokens that come when it is served."""
    checkpoint = Checkpoint(quantized("fp8-static")[0])
    for linear in ("gate_proj", "down_proj"):
        names = [f"model.layers.2.mlp.experts.{number}.{linear}" for number in range(EXPERTS)]
        scales = [float(checkpoint.quantized(name).input_scale) for name in names]  # type: ignore[attr-defined]
        assert scales[3] > max(scales[:3]) / 4
    assert scales[3] > 0


@torch.no_grad()
@pytest.mark.parametrize("reached", [0, 1, 15, 16])
def test_a_quarter_of_its_inputs_is_enough(
    reached: int, source: Path, family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below, it is said that an expert saw tokens of its block; those count for all, as two tokens for each input."""
    runner = BlockRunner(Checkpoint(source), family)
    _, part = runner.load(1, runner.arguments(24)[1])
    hidden = Activations(runner.device, "host", tmp_path)
    hidden.append(torch.randn(2, 24, 64))
    routed = part.route(hidden[0])
    routed.chosen[:] = torch.tensor([1, 2])
    routed.chosen[48 - reached :, 0] = 3
    monkeypatch.setattr(BlockPart, "route", lambda *_: routed)
    work = ExpertRounding(part, hidden, Activations(runner.device, "host", tmp_path, "experts"), GptqMethod())
    found, notes = work._statistics(part.routed_stages[0].by_expert[3], 3)
    assert found.tokens == (reached if reached == 16 else reached + 48)
    assert notes == {"expert_tokens": reached} | ({} if reached == 16 else {"pooled_tokens": 48})
    rows, pool = routed.inputs[48 - reached :], routed.inputs
    others = pool.T @ pool + torch.eye(64) * pool.square().sum(0).mean()
    torch.testing.assert_close(found.hessian, rows.T @ rows + 64 / 48 * others, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_part_runs_no_further_than_it_is_asked(source: Path, family: Family) -> None:
    runner = BlockRunner(Checkpoint(source), family)
    attention, _ = runner.load(1, runner.arguments(8)[1])
    called = []
    for name in ("q_a_proj", "q_b_proj", "o_proj"):
        linear = attention.block.get_submodule(f"self_attn.{name}")
        linear.register_forward_hook(lambda *_, name=name: called.append(name))
    first, second, last = attention.stages
    assert attention.closing == last
    for stage, before in ((first, []), (second, ["q_a_proj"]), (last, ["q_a_proj", "q_b_proj"])):
        called.clear()
        attention.inputs(stage, torch.randn(1, 8, 64))
        assert called == before


@torch.no_grad()
@pytest.mark.parametrize("options", [GptqMethod(), GptqMethod(scaling="awq"), AwqMethod(points=3)])
def test_eight_bits_leave_the_model_as_it_was(
    options: Any, source: Path, family: Family, model: Any, tokens: Tensor, tmp_path: Path
) -> None:
    """Scales folded into the wrong norm or expert would show; what remains is 8-bit rounding."""
    before = model(tokens[:2]).logits
    fmt = CtPacked(bits=8, group_size=32, sym=False, dtype="float32")
    chosen = dict.fromkeys(family.linears(Checkpoint(source).config), fmt)
    work = CalibratedPass(Checkpoint(source), family, chosen, options, "cpu", tmp_path)
    work.begin(tokens)
    changed: set[str] = set()
    for block in work.blocks(lambda _: None):
        changed |= set(block.changed)
        weights = {f"{layer.module}.weight": layer.quantized.dequantize() for layer in block.layers}
        for name, weight in (weights | dict(block.changed)).items():
            model.get_parameter(name).copy_(weight)
    after = model(tokens[:2]).logits
    assert float((after - before).norm() / before.norm()) < 0.05
    norms = {"input_layernorm", "self_attn.q_a_norm", "post_attention_layernorm"}
    expected = {f"model.layers.{layer}.{norm}.weight" for layer in range(LAYERS) for norm in norms}
    assert changed <= expected | {f"model.layers.{layer}.mlp.router.weight" for layer in (1, 2)}
    assert bool(changed) == (options != GptqMethod())
    for layer in (1, 2):  # a norm that experts read takes no scales without their router
        names = [f"model.layers.{layer}.{name}.weight" for name in ("post_attention_layernorm", "mlp.router")]
        assert len({name in changed for name in names}) == 1


@torch.no_grad()
def test_automatic_bits_measure_the_experts_of_a_stage_together(
    source: Path, family: Family, model: Any, tmp_path: Path
) -> None:
    fmt = CtPacked(bits=3, group_size=32, dtype="float32")
    checkpoint, tokens = Checkpoint(source), torch.randint(1, 4096, (4 * SCORED, 16))
    chosen = {name: fmt for name in family.linears(checkpoint.config) if "layers.1." in name}
    found = SensitivityPass(checkpoint, family, chosen, RtnMethod(), "cpu", tmp_path).run(tokens, 3.5)
    assert [each.modules for each in found] == family.linears_by_stage(checkpoint.config)[1]
    base = model(tokens[:SCORED]).logits.flatten(0, 1)
    for name in found[3].modules:
        parameter = model.get_parameter(f"{name}.weight")
        parameter.copy_(fmt.quantize(parameter.detach()).dequantize())
    expected = float(token_divergence(base, model(tokens[:SCORED]).logits.flatten(0, 1)).mean())
    assert found[3].kl == pytest.approx(expected, rel=0.02)
