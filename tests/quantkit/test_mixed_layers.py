"""A family whose layers differ, described as data: quantize, plan and inspect take it as it is.

Attention has two projections in a row (q_a, norm, q_b). The first layer has a dense MLP; in the others a router sends
every token to two of four experts, and to the last expert of the last layer never. Such a family is no part of
quantkit yet: nothing outside this file knows its names.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

import quantkit
from quantkit import arch
from quantkit.arch import Config, Family
from quantkit.blocks import BlockRunner, run_block
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.divergence import token_divergence
from quantkit.errors import InputError
from quantkit.eval.quality.layer_errors import layer_errors
from quantkit.formats import CtPacked, Gptq, IntegerWeight
from quantkit.inspection import inspect_checkpoint
from quantkit.methods.arithmetic import fast_products
from quantkit.methods.gptq import quantize_layer
from quantkit.methods.options import AwqOptions, GptqOptions, RtnOptions
from quantkit.methods.statistics import InputStatistics
from quantkit.methods.steps import UNREACHED
from quantkit.passes import CalibratedPass
from quantkit.passes.sensitivity import SCORED, SensitivityPass
from quantkit.passes.stage_inputs import stage_statistics
from quantkit.planning import make_plan
from quantkit.recipe import load_recipe
from quantkit.reference import load_tokenizer
from quantkit.runtime.model.config import read_model_config
from quantkit.sources import model_folder
from quantkit.stages import Experts, Fold, Part, Stage, dense_stages

LAYERS, EXPERTS, CHOSEN = 3, 4, 2
UNREACHED_EXPERT = "model.layers.2.mlp.experts.3."
FEW = Calibration(samples=6, seq_len=32)

ATTENTION = Part("attention", "self_attn", "input_layernorm")
MLP = Part("mlp", "mlp", "post_attention_layernorm")
TWO_IN_A_ROW = (
    Stage(
        "q_a_kv",
        ("self_attn.q_a_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ATTENTION,
        Fold("norm", "input_layernorm"),
    ),
    Stage("q_b", ("self_attn.q_b_proj",), ATTENTION, Fold("norm", "self_attn.q_a_norm")),
    Stage("output", ("self_attn.o_proj",), ATTENTION, Fold("value", "self_attn.v_proj")),
)


def mixed_layout(layer: int, config: Config) -> tuple[Stage, ...]:
    if layer < config["num_dense_layers"]:
        return TWO_IN_A_ROW + dense_stages()[2:]
    experts = Experts(config["num_experts"], config["num_experts_per_tok"], "mlp.router")
    return (
        *TWO_IN_A_ROW,
        Stage("gate_up", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), MLP, experts=experts),
        Stage("down", ("mlp.experts.{}.down_proj",), MLP, Fold("up", "mlp.experts.{}.up_proj"), experts),
    )


MIXED = Family("mixed_layers", "MixedForCausalLM", layout=mixed_layout)


class MixedConfig(LlamaConfig):
    model_type = "mixed_layers"
    num_dense_layers: int = 1
    num_experts: int = EXPERTS
    num_experts_per_tok: int = CHOSEN
    q_rank: int = 32


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head, keys = config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_rank, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.q_a_norm = LlamaRMSNorm(config.q_rank)
        self.q_b_proj = nn.Linear(config.q_rank, config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        low, k, v = self.q_a_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        q = self.q_b_proj(self.q_a_norm(low))
        q, k, v = (each.unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class ExpertMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.per_token = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_experts)
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(config.num_experts))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).topk(self.per_token)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens, rank = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, tokens, expert(flat[tokens]) * weights[tokens, rank, None])
        return out.view_as(hidden)


class Layer(nn.Module):
    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size)
        self.mlp: nn.Module = LlamaMLP(config) if number < config.num_dense_layers else ExpertMLP(config)

    def forward(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), position_embeddings)[0]
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class MixedModel(PreTrainedModel):
    config_class = MixedConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **_: Any) -> Tensor:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions = self.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=positions)
        result: Tensor = self.norm(hidden)
        return result


class MixedForCausalLM(PreTrainedModel):
    config_class = MixedConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = MixedModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))


AutoConfig.register(MixedConfig.model_type, MixedConfig)
AutoModelForCausalLM.register(MixedConfig, MixedForCausalLM)


@pytest.fixture(autouse=True)
def known_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arch.FAMILIES, MIXED.model_type, MIXED)


def build_model() -> Any:
    config = MixedConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,  # enough that logits depend on every layer
    )
    torch.manual_seed(0)
    model = MixedForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # fresh norms are all alike
            nn.init.uniform_(parameter, 0.3, 1.7)
    with torch.no_grad():
        model.get_parameter("model.layers.2.mlp.router.bias")[3] = -1e4
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32, with the tokenizer of the bundled model."""
    folder = tmp_path_factory.mktemp("mixed") / "model"
    build_model().save_pretrained(folder)
    load_tokenizer(model_folder("demo-draft")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """`quantized(recipe)`: the checkpoint and its report, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(recipe: str) -> tuple[Path, Any]:
        if recipe not in made:
            folder = tmp_path_factory.mktemp("out") / recipe
            made[recipe] = folder, quantkit.quantize(source, recipe, folder, calibration=FEW, quality_windows=1)
        return made[recipe]

    return make


def calibration_tokens(source: Path) -> Tensor:
    return FEW.tokens(load_tokenizer(source), 64)


def codes(quantized: Any) -> Tensor:
    assert isinstance(quantized, IntegerWeight)
    return quantized.codes


def linears_of(model: Any) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head" and not name.endswith("router"):
            yield name


def test_stages_name_every_linear_and_the_router(source: Path) -> None:
    model, config = build_model(), Checkpoint(source).config
    assert sorted(MIXED.linears(config)) == sorted(linears_of(model))
    by_layer = MIXED.linears_by_stage(config)
    assert [[len(modules) for modules in layer] for layer in by_layer] == [[3, 1, 1, 2, 1]] + 2 * [[3, 1, 1, 8, 4]]
    for layer in range(LAYERS):
        for stage in MIXED.stages(layer, config):
            assert (stage.experts is not None) == (layer > 0 and stage.part == MLP)
            if stage.experts is not None:
                router = model.model.layers[layer].get_submodule(stage.experts.router)
                assert (router.out_features, stage.experts.per_token) == (stage.experts.count, CHOSEN)


@torch.no_grad()
def test_block_by_block_equals_whole(source: Path) -> None:
    model, tokens = build_model(), torch.randint(1, 4096, (3, 24))
    runner = BlockRunner(Checkpoint(source), MIXED)
    hidden = runner.embed(tokens)
    for layer, arguments in enumerate(runner.arguments(24)):
        hidden = run_block(runner.load(layer, arguments), hidden)
    assert torch.allclose(model.model.norm(hidden), model.model(tokens), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_expert_sees_the_tokens_that_its_router_sends(source: Path) -> None:
    runner = BlockRunner(Checkpoint(source), MIXED)
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


def test_plain_rounding_rounds_every_linear_by_itself(quantized: Callable[[str], tuple[Path, Any]]) -> None:
    folder, report = quantized("rtn-w4g32")
    checkpoint, model, fmt = Checkpoint(folder), build_model(), Gptq(bits=4, group_size=32)
    assert report.warnings == []
    assert set(checkpoint.formats) == set(linears_of(model))
    for name in linears_of(model):
        weight = model.get_parameter(f"{name}.weight").detach()
        assert torch.equal(codes(checkpoint.quantized(name)), codes(fmt.quantize(weight)))


@torch.no_grad()
def test_gptq_rounds_an_expert_by_its_own_tokens(source: Path, quantized: Callable[[str], tuple[Path, Any]]) -> None:
    """The direct way: the model with everything before the experts of layer 1 quantized, and one hook on each expert."""
    folder, _ = quantized("gptq-w4g32")
    checkpoint, model, fmt = Checkpoint(folder), build_model(), Gptq(bits=4, group_size=32)
    for name in MIXED.linears(checkpoint.config):
        if name.startswith(("model.layers.0.", "model.layers.1.self_attn.")):
            model.get_parameter(f"{name}.weight").copy_(checkpoint.weight(name, torch.float32))
    experts = model.model.layers[1].mlp.experts
    seen = [InputStatistics(64) for _ in experts]
    for expert, statistics in zip(experts, seen, strict=True):
        expert.register_forward_pre_hook(lambda _, inputs, to=statistics: to.add(inputs[0]))
    tokens = calibration_tokens(source)
    with fast_products(torch.device("cpu")):
        model(tokens)
    assert sum(each.tokens for each in seen) == CHOSEN * tokens.numel()
    for number, (expert, statistics) in enumerate(zip(experts, seen, strict=True)):
        weight = torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
        direct = codes(quantize_layer(weight, fmt, statistics.require_hessian(), GptqOptions()).quantized)
        names = [f"model.layers.1.mlp.experts.{number}.{linear}" for linear in ("gate_proj", "up_proj")]
        found = torch.cat([codes(checkpoint.quantized(name)) for name in names])
        assert float((found == direct).float().mean()) > 0.999  # sums of floats in another order
        plain = codes(fmt.quantize(weight))
        assert float((found == plain).float().mean()) < 0.95


@pytest.mark.parametrize("recipe", ["gptq-w4g32", "awq-w4g32"])
def test_an_expert_without_tokens_is_plainly_rounded_with_a_warning(
    recipe: str, quantized: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, report = quantized(recipe)
    checkpoint, model = Checkpoint(folder), build_model()
    names = [UNREACHED_EXPERT + linear for linear in ("gate_proj", "up_proj", "down_proj")]
    assert report.warnings == [f"{name}: {UNREACHED}" for name in names]
    for name in names:
        weight = model.get_parameter(f"{name}.weight").detach()
        assert torch.equal(codes(checkpoint.quantized(name)), codes(checkpoint.formats[name].quantize(weight)))
    assert [layer.module for layer in report.layers] == MIXED.linears(checkpoint.config)
    assert report.quality is not None


@torch.no_grad()
@pytest.mark.parametrize("options", [GptqOptions(), GptqOptions(scaling="awq"), AwqOptions(points=3)])
def test_eight_bits_leave_the_model_as_it_was(options: Any, source: Path, tmp_path: Path) -> None:
    """Scales folded into the wrong norm or expert would show; what remains is 8-bit rounding."""
    model, tokens = build_model(), calibration_tokens(source)
    before = model(tokens[:2]).logits
    fmt = CtPacked(bits=8, group_size=32, sym=False, dtype="float32")
    chosen = dict.fromkeys(MIXED.linears(Checkpoint(source).config), fmt)
    work = CalibratedPass(Checkpoint(source), MIXED, chosen, options, "cpu", tmp_path)
    work.begin(tokens)
    changed: set[str] = set()
    for block in work.blocks(lambda _: None):
        changed |= set(block.changed)
        weights = {f"{layer.module}.weight": layer.quantized.dequantize() for layer in block.layers}
        for name, weight in (weights | dict(block.changed)).items():
            model.get_parameter(name).copy_(weight)
    after = model(tokens[:2]).logits
    assert float((after - before).norm() / before.norm()) < 0.05
    norms = {"input_layernorm", "self_attn.q_a_norm"}
    expected = {f"model.layers.{layer}.{norm}.weight" for layer in range(LAYERS) for norm in norms}
    expected.add("model.layers.0.post_attention_layernorm.weight")  # that of the others feeds a router too
    assert changed <= expected
    assert bool(changed) == (options != GptqOptions())


@torch.no_grad()
def test_automatic_bits_measure_the_experts_of_a_stage_together(source: Path, tmp_path: Path) -> None:
    fmt = CtPacked(bits=3, group_size=32, dtype="float32")
    checkpoint, model, tokens = Checkpoint(source), build_model(), torch.randint(1, 4096, (4 * SCORED, 16))
    chosen = {name: fmt for name in MIXED.linears(checkpoint.config) if "layers.1." in name}
    found = SensitivityPass(checkpoint, MIXED, chosen, RtnOptions(), "cpu", tmp_path).run(tokens, 3.5)
    assert [each.modules for each in found] == MIXED.linears_by_stage(checkpoint.config)[1]
    base = model(tokens[:SCORED]).logits.flatten(0, 1)
    for name in found[3].modules:
        parameter = model.get_parameter(f"{name}.weight")
        parameter.copy_(fmt.quantize(parameter.detach()).dequantize())
    expected = float(token_divergence(base, model(tokens[:SCORED]).logits.flatten(0, 1)).mean())
    assert found[3].kl == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("recipe", ["rtn-w4g32", "gptq-w4g32", "awq-w4g32"])
def test_plan_and_inspect_know_the_sizes(
    recipe: str, source: Path, quantized: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, report = quantized(recipe)
    plan = make_plan(Checkpoint(source), load_recipe(recipe), samples=6, seq_len=32, device="cpu")
    written = inspect_checkpoint(folder)
    linears = MIXED.linears(Checkpoint(source).config)
    assert [scheme.layers for scheme in plan.output.schemes] == [len(linears)] == list(written.schemes.values())
    assert plan.output.bytes == report.bytes == written.bytes
    assert plan.model.parameters == written.parameters
    assert plan.output.kept == ()
    assert plan.needs.seconds > 0
    layers = [written.layer_bytes[f"layer {layer}"] for layer in range(LAYERS)]
    assert layers[0] < layers[1] == layers[2]


def test_a_dry_run_takes_the_same_road(source: Path, run_cli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run_cli("quantize", source, "-r", "gptq-w4g32", "-o", source.parent / "none", "--dry-run")
    assert code == 0, err
    assert f"{len(MIXED.linears(Checkpoint(source).config))} layers" in out


def test_experts_must_share_a_scheme(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text(
        "summary: mixed\nmethod: rtn\nformat: {name: ct-packed, bits: 4, group_size: 32}\n"
        "overrides: [{modules: '*.experts.2.*', bits: 8}]\n"
    )
    with pytest.raises(InputError, match=r"1\.mlp\.experts\.0\.gate_proj would be W4 .*experts\.2\.gate_proj would be"):
        quantkit.quantize(source, str(file), tmp_path / "out")


def test_errors_of_layers_that_differ(source: Path, quantized: Callable[[str], tuple[Path, Any]]) -> None:
    tokens = calibration_tokens(source)[:2]
    same = layer_errors(source, source, tokens)
    assert {error for errors in same.linears.values() for error in errors} == {0.0}
    scaled = layer_errors(source, quantized("awq-w4g32")[0], tokens)
    assert set(scaled.linears) == {name.rpartition(".")[2] for name in MIXED.linears(Checkpoint(source).config)}
    assert all(len(errors) == LAYERS for errors in scaled.linears.values())
    assert all(error is not None and 0 < error < 0.3 for errors in scaled.linears.values() for error in errors)


def test_the_runtime_refuses_in_one_line(source: Path) -> None:
    with pytest.raises(InputError, match=r"'mixed_layers' cannot be run: layer 0 consists of q_a_kv, q_b") as error:
        read_model_config(Checkpoint(source).config)
    assert "\n" not in str(error.value)
