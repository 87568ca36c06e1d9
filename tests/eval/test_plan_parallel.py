"""quantkit plan --tensor-parallel: against arithmetic by hand, the plan for one GPU, and its own limits."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from long_cases import others_long
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.eval.plan.gpus import GPUS
from quantkit.eval.plan.links import LINKS, Link, find_link
from quantkit.eval.plan.memory import reserve_of
from quantkit.eval.plan.model import Decoder, PlannedModel, read_model
from quantkit.eval.plan.parallel import (
    ParallelPlan,
    Spread,
    StageTime,
    pipeline_ahead_from,
    plan_parallel,
    spread,
    step_seconds,
)
from quantkit.eval.plan.plan import plan_serving
from quantkit.eval.plan.question import Question
from quantkit.eval.plan.shards import Shard, shard
from quantkit.eval.plan.source import find_config
from quantkit.eval.plan.weights import Chosen, choose, in_format, keep, quantized, unquantized
from quantkit.formats import CtFloat8, CtInt8, Format, Gptq, LlmInt8, Nf4
from quantkit.recipe import load_recipe
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.ranks import Ranks
from quantkit.runtime.parallel.rank_memory import rank_weight_bytes

H200 = GPUS["h200"]
NVLINK, PCIE = LINKS["nvlink"], LINKS["pcie"]
QUESTION = Question(batches=(1, 8, 32, 256))


def model_of(name: str) -> PlannedModel:
    return read_model(*find_config(name))


def decoder_of(model: PlannedModel) -> Decoder:
    assert model.decoder is not None
    return model.decoder


def shards(name: str, ranks: Ranks, recipe: str | None = None) -> list[Shard]:
    """One rank of every stage."""
    model = model_of(name)
    decoder = decoder_of(model)
    chosen = keep(decoder) if recipe is None else choose(model, load_recipe(recipe))
    stages = range(ranks.pipeline)
    return [shard(decoder, chosen, Ranks(ranks.tensor, ranks.pipeline, stage * ranks.tensor)) for stage in stages]


def all_in(name: str, fmt: Format) -> tuple[Decoder, Chosen]:
    decoder = decoder_of(model_of(name))
    return decoder, Chosen(fmt.name, fmt.describe(), dict.fromkeys(decoder.linears, fmt))


def plan(name: str, *layouts: Ranks, recipes: tuple[str, ...] = ("gptq-w4g128",)) -> ParallelPlan:
    loaded = [load_recipe(recipe) for recipe in recipes]
    return plan_parallel(model_of(name), loaded, H200, QUESTION, layouts, (NVLINK, PCIE))


def test_a_rank_of_llama_70b_by_hand() -> None:
    (rank,) = shards("llama-3.1-70b", Ranks(8))
    # of 64 heads 8, of 8 KV heads 1, of 28,672 channels 3,584
    block = 2 * (8 * 128 * 8192) + 2 * (128 * 8192) + 3 * 3584 * 8192
    norms = 80 * 2 * 8192 + 8192
    head = 128256 // 8 * 8192  # and as many rows of the embedding
    assert rank.weights.bytes == 2 * (80 * block + norms + 2 * head)
    assert rank.weights.read == 2 * (80 * block + norms + head)
    assert rank.weights.operations == {"bf16": 2 * (80 * block + head)}
    assert rank.cache.per_token * 2 == 80 * 2 * 1 * 128 * 2 == 40_960
    assert rank.traffic.reduced == (1 + 2 * 80) * 8192 * 2 == 2_637_824
    assert (rank.traffic.reduces, rank.traffic.gathers, rank.traffic.logits) == (161, 0, 128256 * 2)


def test_a_rank_in_w4_by_hand() -> None:
    (rank,) = shards("llama-3.1-70b", Ranks(4), "gptq-w4g128")
    linear = 80 * (2 * (16 * 128 * 8192) + 2 * (2 * 128 * 8192) + 3 * 7168 * 8192)
    columns = 80 * (5 * 8192 + 16 * 128 + 7168)  # an int32 for every input of every layer: o and down have a quarter
    assert rank.weights.linear_bytes == linear // 2 + linear // 128 * 2 + linear // 128 // 2 + 4 * columns


def test_kv_heads_are_replicated_where_ranks_are_more() -> None:
    eight, sixteen = (shards("llama-3.1-70b", Ranks(count))[0] for count in (8, 16))
    assert eight.cache.per_token == sixteen.cache.per_token
    whole = decoder_of(model_of("llama-3.1-70b")).linear_weights
    assert 8 * eight.decoder.linear_weights == whole
    assert 16 * sixteen.decoder.linear_weights == whole + 80 * 8 * 2 * 128 * 8192  # each k and v once more


@pytest.mark.parametrize("recipe", [None, "nf4", "llm-int8"])
def test_stages_hold_the_model_once(recipe: str | None) -> None:
    model = model_of("llama-3.1-405b")
    whole = unquantized(decoder_of(model)) if recipe is None else quantized(model, load_recipe(recipe))
    for stages in (2, 4, 5, 126):
        parts = shards("llama-3.1-405b", Ranks(1, stages), recipe)
        assert sum(part.weights.bytes for part in parts) == whole.bytes
        assert sum(part.cache.layers for part in parts) == 126
        assert parts[0].cache.layers == min(part.cache.layers for part in parts) >= 1
        assert all(part.traffic.reduces == part.traffic.logits == 0 for part in parts)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-1.5b", "gemma-2-9b", "phi-3-mini"])
@pytest.mark.parametrize("recipe", ["gptq-w4g128", "fp8"])
def test_one_rank_is_the_plan_for_one_gpu(name: str, recipe: str) -> None:
    model = model_of(name)
    one = plan_serving(model, [load_recipe(recipe)], H200, QUESTION).formats[1]
    here = spread(decoder_of(model), choose(model, load_recipe(recipe)), Ranks(), H200, QUESTION)
    (stage,) = here.stages
    assert stage.shard.weights == one.weights
    assert replace(stage.fit) == one.fit
    for batch in (1, 64):
        assert step_seconds(here.times(NVLINK, 4096), batch) == pytest.approx(one.ceiling.decode(batch, 4096).seconds)
        assert here.prefill_seconds(NVLINK, 512, batch) == pytest.approx(one.ceiling.prefill_seconds(512, batch))


def test_a_pipeline_fills_and_drains_with_prompts() -> None:
    """Four equal stages, four prompts: seven times what a stage takes, of which a stage works four."""
    found = plan("llama-3.1-8b", Ranks(1, 4)).formats[0].spreads[Ranks(1, 4)]
    stages = [stage.ceiling.prefill_seconds(512) + NVLINK.send(512 * found.boundary_bytes) for stage in found.stages]
    assert found.prefill_seconds(NVLINK, 512, 4) == pytest.approx(sum(stages) + 3 * max(stages))
    assert found.prefill_seconds(NVLINK, 512, 1) == pytest.approx(sum(stages))
    assert 4 * 512 / found.prefill_seconds(NVLINK, 512, 4) >= found.prefill_tokens_per_second(NVLINK, 512)


def test_several_gpus_answer_with_their_prompts() -> None:
    found = plan("llama-3.1-8b", Ranks(2)).formats[0]
    prompts, steps = found.spreads[Ranks(2)].prefill_seconds(NVLINK, 1000, 8), found.seconds(Ranks(2), NVLINK, 8, 1050)
    rate = found.answer_tokens_per_second(Ranks(2), NVLINK, 8, 1000, 101)
    assert rate == pytest.approx(8 * 101 / (prompts + 100 * steps))


def test_fused_and_biased_families_are_cut_part_by_part() -> None:
    (phi,) = shards("phi-3-mini", Ranks(4))
    assert phi.decoder.linears["model.layers.0.self_attn.qkv_proj"] == (3 * 8 * 96, 3072)
    assert phi.decoder.linears["model.layers.0.mlp.gate_up_proj"] == (2 * 2048, 3072)
    (qwen,) = shards("qwen2.5-7b", Ranks(2))  # q has 14 of 28 heads, k and v 2 of 4; two norms a block, one at the end
    assert qwen.decoder.other == 28 * (14 + 2 * 2) * 128 + (2 * 28 + 1) * 3584


@pytest.mark.parametrize(
    ("fmt", "reduces", "gathers"),
    [
        (Gptq(), 160, 0),
        (Gptq(act_order=True), 80, 160),  # attention outputs gather
        (Nf4(), 160, 0),
        (LlmInt8(), 0, 320),
        (CtInt8(), 0, 320),
        (CtFloat8(), 0, 320),
        (CtFloat8(strategy="block"), 160, 0),  # scales of 128 inputs, which 8 ranks do not cut
        (CtFloat8(strategy="tensor", activations="static"), 160, 0),
    ],
    ids=lambda value: value.describe() if isinstance(value, Format) else str(value),
)
def test_what_is_gathered_instead(fmt: Format, reduces: int, gathers: int) -> None:
    decoder, chosen = all_in("llama-3.1-70b", fmt)
    rank = shard(decoder, chosen, Ranks(8))
    assert (rank.traffic.reduces, rank.traffic.gathers) == (1 + reduces, gathers)  # one for the embedding
    rows = {True: (1024, 8192), False: (8192, 1024)}  # of the attention output: cut by outputs, or by inputs
    assert rank.decoder.linears["model.layers.3.self_attn.o_proj"] == rows[gathers > 0]
    down = {True: (1024, 28672), False: (8192, 3584)}
    assert rank.decoder.linears["model.layers.3.mlp.down_proj"] == down[gathers == 320]
    attention, mlp = (8192 + 8192) * 2 * 80, (28672 + 8192) * 2 * 80
    assert rank.traffic.gathered == {0: 0, 160: attention, 320: attention + mlp}[gathers]


def test_collectives_by_hand() -> None:
    link = Link("x", 100e9, 0.5, 2e-6)
    assert link.all_reduce(8e6, 4) == pytest.approx(6.6e-6 + 6 * 2e-6 + 2 * 3 / 4 * 8e6 / 50e9)
    assert link.all_gather(8e6, 4) == pytest.approx(6.6e-6 + 3 * 2e-6 + 3 / 4 * 8e6 / 50e9)
    assert link.send(8e6) == pytest.approx(6.6e-6 + 2e-6 + 8e6 / 50e9)
    assert link.all_reduce(8e6, 1) == link.all_gather(8e6, 1) == 0
    given = find_link("50:2.7")
    assert (given.bandwidth, given.hop) == (50e9, 2.7e-6)
    assert find_link("50").bandwidth == 50e9
    assert (NVLINK.nominal, PCIE.nominal, LINKS["pcie4"].nominal) == (450e9, 64e9, 32e9)


@pytest.mark.parametrize("text", ["", "fast", "-1", "0", "nan", "inf", "50:x", "50:-1", "50:2000000"])
def test_links_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--link is"):
        find_link(text)


def test_a_decode_step_on_eight_ranks_by_hand() -> None:
    decoder = decoder_of(model_of("llama-3.1-70b"))
    here = spread(decoder, keep(decoder), Ranks(8), H200, QUESTION)
    rank = here.stages[0].shard
    moved = (rank.weights.read + 32 * 4096 * 40_960) / 4.8e12
    one = 6.6e-6 + 14 * 0.6e-6 + 2 * 7 / 8 * 32 * 8192 * 2 / (0.82 * 450e9)
    logits = 6.6e-6 + 7 * 0.6e-6 + 7 / 8 * 32 * 128256 * 2 / (0.82 * 450e9)
    assert step_seconds(here.times(NVLINK, 4096), 32) == pytest.approx(moved + 161 * one + logits)


def test_a_pipeline_passes_micro_batches() -> None:
    fast, slow = (StageTime(weights, 1e-6, 0.0, 0.0, 0.0) for weights in (1e-3, 2e-3))
    three = Counter({fast: 2, slow: 1})
    assert step_seconds(three, 1) == pytest.approx(4e-3 + 3e-6)  # one request goes through all of them
    assert step_seconds(three, 300) == pytest.approx(3 * (2e-3 + 100e-6))  # the slow one sees three micro-batches
    assert step_seconds(Counter({slow: 1}), 7) == slow.seconds(7)


@pytest.mark.parametrize(("stages", "bubble"), [(1, 0.0), (2, 1 / 3), (4, 3 / 7), (8, 7 / 15)])
def test_the_bubble(stages: int, bubble: float) -> None:
    decoder = decoder_of(model_of("llama-3.1-70b"))
    here = spread(decoder, keep(decoder), Ranks(1, stages), H200, QUESTION)
    assert here.bubble == pytest.approx(bubble)


def test_no_layout_is_faster_than_its_gpus() -> None:
    found = plan("llama-3.1-70b", *(Ranks(*pair) for pair in ((2, 1), (8, 1), (16, 1), (1, 8), (8, 2))))
    for ranks in found.layouts:
        for one in found.formats:
            gains = [one.speed_up(ranks, link, batch, 4096) for link in found.links for batch in (1, 32, 1024)]
            assert all(0.9 < gain <= ranks.world for gain in gains), (ranks, one.name, gains)
            assert all(fast >= slow for fast, slow in zip(gains[:3], gains[3:], strict=True))


def test_where_a_pipeline_is_ahead() -> None:
    """Over PCIe from some batch on; alone a request gains nothing from stages."""
    found = plan("llama-3.1-70b", Ranks(8))
    for one in found.formats:
        tensor, pipeline = (one.spreads[ranks].times(PCIE, 4096) for ranks in (Ranks(8), Ranks(1, 8)))
        batch = pipeline_ahead_from(tensor, pipeline)
        assert batch is not None
        assert step_seconds(pipeline, batch) < step_seconds(tensor, batch)
        assert step_seconds(pipeline, batch - 1) >= step_seconds(tensor, batch - 1)
        assert one.speed_up(Ranks(1, 8), PCIE, 1, 4096) <= 1 < one.speed_up(Ranks(8), PCIE, 1, 4096)
        later = pipeline_ahead_from(*(one.spreads[r].times(NVLINK, 4096) for r in (Ranks(8), Ranks(1, 8))))
        assert later is None or later > batch


def test_prefill_pays_for_the_bubble_or_for_the_link() -> None:
    found = plan("llama-3.1-70b", Ranks(4)).formats[0]
    tensor, pipeline = found.spreads[Ranks(4)], found.spreads[Ranks(1, 4)]
    assert tensor.prefill_tokens_per_second(NVLINK, 4096) > pipeline.prefill_tokens_per_second(NVLINK, 4096)
    assert tensor.prefill_tokens_per_second(PCIE, 4096) < pipeline.prefill_tokens_per_second(PCIE, 4096)
    slowest = max(stage.ceiling.prefill_seconds(4096) for stage in pipeline.stages) + PCIE.send(4096 * 8192 * 2)
    assert pipeline.prefill_tokens_per_second(PCIE, 4096) == pytest.approx(4096 / slowest * 4 / 7)


def test_room_is_that_of_the_tightest_stage() -> None:
    decoder = decoder_of(model_of("llama-3.1-405b"))
    here: Spread = spread(decoder, keep(decoder), Ranks(4, 4), H200, QUESTION)
    assert here.requests == min(stage.fit.requests for stage in here.stages)
    assert here.weight_bytes == max(stage.shard.weights.bytes for stage in here.stages)
    for stage in here.stages:
        assert stage.fit.reserve == reserve_of(stage.shard.decoder, 4).total < reserve_of(decoder).total
        assert stage.fit.page_bytes == 16 * stage.shard.cache.layers * 2 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("recipe", "tolerance"),
    others_long([("rtn-w4g64", 0.012), ("nf4", 0.055), ("llm-int8", 0.01)], [("rtn-w4g64", 0.012)]),
)
def test_a_rank_takes_what_the_engine_counts(
    recipe: str, tolerance: float, quantized_demo: Callable[..., Path]
) -> None:
    """Of a real checkpoint. The engine takes shares of files, where the plan knows which parts are never cut."""
    checkpoint = Checkpoint(quantized_demo(recipe))
    config = read_model_config(checkpoint.config)
    for ranks in (Ranks(2), Ranks(4), Ranks(1, 2), Ranks(2, 2)):
        for part in shards("demo", ranks, recipe):
            counted = rank_weight_bytes(checkpoint, config, torch.bfloat16, part.ranks)
            assert part.weights.bytes == pytest.approx(counted, rel=tolerance), part.ranks


def test_groups_are_not_cut_apart() -> None:
    model = model_of("qwen2.5-1.5b")  # 8,960 channels: 70 groups of 128, 140 of 64
    with pytest.raises(InputError, match=r"mlp\.down_proj as gptq-w4g128 has 70 groups of 128 .* --tensor-parallel 2"):
        shards("qwen2.5-1.5b", Ranks(4), "gptq-w4g128")
    assert shards("qwen2.5-1.5b", Ranks(4), "gptq-w4g64")
    assert shards("qwen2.5-1.5b", Ranks(4), "nf4")
    assert shards("qwen2.5-1.5b", Ranks(4), "gptq-w8")  # one group a row
    whole = in_format(model, "x", Gptq(bits=8, group_size=-1))
    (rank,) = shards("qwen2.5-1.5b", Ranks(2), "gptq-w8")
    assert whole.linear_bytes / 2 < rank.weights.linear_bytes < 0.52 * whole.linear_bytes  # scales of a row stand twice


def test_formats_that_cannot_be_cut_are_left_out() -> None:
    found = plan("qwen2.5-1.5b", Ranks(4), recipes=("gptq-w4g128", "gptq-w4g64"))
    assert [one.name for one in found.formats] == ["bf16", "gptq-w4g64"]
    assert "gptq-w4g128 is left out" in found.warnings[0]
    with pytest.raises(InputError, match="70 groups of 128"):
        plan("qwen2.5-1.5b", Ranks(4))


def test_fitting_nowhere_names_what_would_do() -> None:
    with pytest.raises(InputError, match=r"does not fit on 4 x H200 .* it fits with --tensor-parallel 8") as caught:
        plan("llama-3.1-405b", Ranks(4), recipes=())
    assert "\n" not in str(caught.value)
    assert plan("llama-3.1-405b", Ranks(8), recipes=()).formats[0].spreads[Ranks(8)].requests > 0


def test_every_figure_is_finite() -> None:
    for name in ("llama-3.1-8b", "gemma-2-9b"):
        for one in plan(name, Ranks(2), Ranks(1, 2), Ranks(2, 2)).formats:
            for here in one.spreads.values():
                assert math.isfinite(here.prefill_tokens_per_second(PCIE, 4096))
                assert all(step_seconds(here.times(PCIE, 4096), batch) > 0 for batch in (1, 3, 4096))
