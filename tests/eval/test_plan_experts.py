"""quantkit plan for models with experts: published counts, bytes of real checkpoints, and what a step reads of them."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.checkpoint import Checkpoint
from quantkit.eval.plan.explain import explain
from quantkit.eval.plan.gpus import GPUS
from quantkit.eval.plan.links import LINKS
from quantkit.eval.plan.memory import LIBRARIES, SEQUENCES, STEP_TOKENS, reserve_of
from quantkit.eval.plan.model import Decoder, PlannedModel, read_model
from quantkit.eval.plan.parallel import spread, step_seconds
from quantkit.eval.plan.plan import plan_serving
from quantkit.eval.plan.question import Question
from quantkit.eval.plan.roofline import Ceiling
from quantkit.eval.plan.weights import choose, keep, quantized, unquantized
from quantkit.eval.shapes import SHAPES
from quantkit.recipe import load_recipe
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device import memory as runtime_memory
from quantkit.runtime.model.ranks import Ranks
from tiny_models import WITH_EXPERTS

H200 = GPUS["h200"]
QWEN3 = SHAPES["qwen3-30b-a3b"]
QWEN2 = {  # Qwen1.5-MoE-A2.7B
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 8192,
}
MIXTRAL = SHAPES["mixtral-8x7b"]
V2_LITE = SHAPES["deepseek-v2-lite"]
GLM4 = {  # GLM-4.5-Air
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 131072,
}
EXPERT = 3 * 768 * 2048  # weights of one of Qwen3's
ATTENTION = 2 * 4096 * 2048 + 2 * 512 * 2048
HEAD = 151936 * 2048
OTHER = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048  # norms and routers


def model_of(config: dict[str, Any]) -> PlannedModel:
    return read_model("model", config)


def decoder_of(config: dict[str, Any]) -> Decoder:
    found = model_of(config).decoder
    assert found is not None
    return found


@cache
def ceiling_of(recipe: str | None = None) -> Ceiling:
    model, decoder = model_of(QWEN3), decoder_of(QWEN3)
    weights = unquantized(decoder) if recipe is None else quantized(model, load_recipe(recipe))
    return Ceiling(model.cache, decoder.attention_width, weights, H200)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN3, 30_532_122_624),
        (QWEN2, 14_315_784_192),
        (MIXTRAL, 46_702_792_704),
        (V2_LITE, 15_706_484_224),
        (SHAPES["deepseek-v3"], 671_026_419_200),
        (GLM4, 106_852_251_264),  # corrections of routers too, which transformers does not count
    ],
)
def test_parameters_are_those_of_the_published_models(config: dict[str, Any], parameters: int) -> None:
    assert decoder_of(config).parameters == parameters


def test_a_token_reads_its_own_experts() -> None:
    """3.3 of 30.5 billion parameters, without the embedding."""
    weights = unquantized(decoder_of(QWEN3))
    assert weights.bytes == 2 * (48 * (ATTENTION + 128 * EXPERT) + 2 * HEAD + OTHER)
    assert weights.read_for(1) == 2 * (48 * (ATTENTION + 8 * EXPERT) + HEAD + OTHER)
    assert weights.operations == {"bf16": 2 * (48 * (ATTENTION + 8 * EXPERT) + HEAD)}
    distinct = 128 * (1 - (1 - 8 / 128) ** 16)
    assert weights.read_for(16) == round(2 * (48 * (ATTENTION + distinct * EXPERT) + HEAD + OTHER))
    assert weights.read_for(100_000) == weights.bytes - 2 * HEAD


def test_shared_experts_and_dense_layers_are_read_by_all() -> None:
    weights = unquantized(decoder_of(QWEN2 | {"mlp_only_layers": [0, 5]}))
    (routed,) = weights.routed
    assert (routed.bytes, routed.count, routed.per_token) == (2 * 22 * 60 * 3 * 1408 * 2048, 60, 4)
    assert weights.read_for(0) == weights.read > 2 * (24 * 3 * 5632 * 2048 + HEAD)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [*zip(WITH_EXPERTS, ("llm-int8", *["rtn-w4g32"] * 3, "mxfp4", "rtn-w4g32", "llm-int8"), strict=True)],
)  # fmt: skip
def test_bytes_are_those_of_a_real_checkpoint(
    family: str, recipe: str, family_model: Callable[[str], Path], tmp_path: Path
) -> None:
    quantkit.quantize(family_model(family), recipe, tmp_path / "out", quality_windows=0)
    checkpoint = Checkpoint(tmp_path / "out")
    written = sum(stored.nbytes for stored in checkpoint.tensors.values())
    kept = sum(checkpoint.tensors[name].nbytes for name in checkpoint.plain_names())  # in float32 here
    config = Checkpoint(family_model(family)).config
    assert quantized(read_model(family, config), load_recipe(recipe)).bytes == written - kept // 2


def test_decode_by_hand() -> None:
    step = ceiling_of().decode(16, 1024)
    cache = 16 * 1024 * 48 * 2 * 4 * 128 * 2
    assert step.bytes == ceiling_of().weights.read_for(16) + cache
    prefill = ceiling_of().prefill_seconds(1)
    assert prefill == pytest.approx(ceiling_of().weights.read_for(1) / 4.8e12)


@pytest.mark.parametrize("recipe", [None, "nf4"])
def test_where_computing_begins_to_bound(recipe: str | None) -> None:
    """The more requests, the more experts are read: the limit is where both lines meet."""
    ceiling = ceiling_of(recipe)
    limit = ceiling.bandwidth_bound_up_to(16)
    assert 100 < limit < math.inf
    assert ceiling.decode(math.floor(limit), 16).bound == "memory"
    assert ceiling.decode(math.ceil(limit) + 1, 16).bound == "compute"


def test_the_reserve_is_the_engines_own() -> None:
    decoder = decoder_of(QWEN3)
    sizes = {"max_sequences": SEQUENCES, "step_tokens": STEP_TOKENS, "kv_tokens": 64, "max_context": 32}
    options = EngineOptions(device="cpu", **sizes)
    planned = runtime_memory.plan_memory(decoder.config, 0, torch.bfloat16, options, available=1 << 40)
    reserve = reserve_of(decoder)
    assert reserve.total - reserve.graphs == planned.activations + LIBRARIES
    assert reserve.graphs == runtime_memory._graph_bytes(decoder.config, torch.bfloat16, options)


def test_latents_by_hand() -> None:
    """What a step reads of them, and what attention computes: heads over one latent, prompts over keys and values."""
    model, decoder = model_of(V2_LITE), decoder_of(V2_LITE)
    ceiling = Ceiling(model.cache, decoder.attention_width, unquantized(decoder), H200, 2, decoder.prompt_width)
    assert (model.cache.kind, model.cache.per_layer) == ("MLA", 512 + 64)
    assert ceiling.cache_bytes(1000) == 1000 * 27 * 576 * 2
    assert ceiling.attention_operations(1) == 16 * (2 * 576 + 2 * 512)
    assert decoder.prompt_width * 4 == 16 * (2 * 192 + 2 * 128)


def test_the_reserve_of_latents_is_the_engines_own() -> None:
    decoder = decoder_of(V2_LITE)
    options = EngineOptions(
        device="cpu", max_sequences=SEQUENCES, step_tokens=STEP_TOKENS, kv_tokens=64, max_context=32
    )
    planned = runtime_memory.plan_memory(decoder.config, 0, torch.bfloat16, options, available=1 << 40)
    assert planned.page_bytes == model_of(V2_LITE).cache.per_token * 2 * options.page_size
    reserve = reserve_of(decoder)
    assert reserve.expanded == 163_840 * (3 * 576 + 48) + (128 << 20)  # on a GPU alone
    assert reserve.total - reserve.graphs - reserve.expanded == planned.activations + LIBRARIES


def test_stages_hold_their_own_experts() -> None:
    model, decoder, question = model_of(QWEN3), decoder_of(QWEN3), Question(context=1024)
    chosen = choose(model, load_recipe("nf4"))
    one, two = (spread(decoder, chosen, Ranks(1, stages), H200, question) for stages in (1, 2))
    parts = [stage.shard.weights for stage in two.stages]
    assert sum(part.bytes for part in parts) == one.stages[0].shard.weights.bytes
    assert sum(part.read_for(9) for part in parts) == pytest.approx(one.stages[0].shard.weights.read_for(9), rel=1e-6)
    link = next(iter(LINKS.values()))
    assert step_seconds(one.times(link, 1024), 9) == pytest.approx(one.stages[0].ceiling.decode(9, 1024).seconds)


@pytest.mark.parametrize("config", [QWEN3, QWEN2, MIXTRAL, V2_LITE], ids=lambda config: config["model_type"])
def test_ranks_divide_experts(config: dict[str, Any]) -> None:
    """The first rank has most of them, whole; attention, dense layers and shared experts are cut; routers are not."""
    decoder, question = decoder_of(config), Question(context=1024)
    chosen = keep(decoder)
    one, eight = (
        spread(decoder, chosen, Ranks(tensor, experts=tensor > 1), H200, question).stages[0].shard for tensor in (1, 8)
    )
    routed = [sum(part.bytes for part in each.weights.routed) for each in (one, eight)]
    (count,) = {experts.count for experts in decoder.experts.values()}
    most = -(-count // 8)
    assert routed[1] == routed[0] * most // count
    assert len(eight.decoder.experts) == len(decoder.experts) * most // count
    assert eight.weights.read < one.weights.read / 4
    assert eight.traffic.reduces == 2 * decoder.config.layers + 1


def test_experts_need_their_own_word(run_cli: Callable[..., tuple[int, str, str]]) -> None:
    shape = ("plan", "qwen3-30b-a3b", "-r", "nf4", "--tensor-parallel")
    code, _, err = run_cli(*shape, "2")
    assert (code, "add --expert-parallel" in err) == (2, True)
    code, out, _ = run_cli(*shape, "2", "--pipeline-parallel", "2", "--expert-parallel")
    assert (code, "tensor 2 x pipeline 2" in out) == (0, True)
    code, out, _ = run_cli(*shape, "8", "--expert-parallel", "--explain")
    assert (code, "16 of 128 experts" in out, "ms experts that are chosen" in out) == (0, True, True)
    for wrong in (shape[:-1], (*shape, "1")):
        code, _, err = run_cli(*wrong, "--expert-parallel")
        assert (code, err.count("\n"), "--tensor-parallel" in err) == (2, 1, True)


def test_a_plan_says_what_it_assumes() -> None:
    plan = plan_serving(model_of(QWEN3), [load_recipe("gptq-w4g128")], H200, Question(context=1024, batches=(1, 8)))
    assert not any("experts" in line for line in plan.warnings)
    lines = dict(explain(plan))
    assert "(1 - (1 - 8 / 128)^8)" in lines["experts that are read"]
    assert "norms, biases, routers" in lines
    assert lines["a weight in 16 bit"].startswith("2,048 x 98,304 x 2 x 2 bytes")  # of all 128 experts of a layer
    assert [found.weights.name for found in plan.formats] == ["bf16", "gptq-w4g128"]
