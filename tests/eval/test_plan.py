"""quantkit plan: against arithmetic by hand, published counts, real checkpoints, measured speeds, the engine's plan."""

import csv
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from quantkit.arch import FAMILIES
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.eval.kernels.cases import FORMATS
from quantkit.eval.plan.cost import cost_of_million
from quantkit.eval.plan.gpus import GPUS, Gpu, find_gpu, recognise
from quantkit.eval.plan.memory import LIBRARIES, SEQUENCES, STEP_TOKENS, fit, reserve_of
from quantkit.eval.plan.model import Decoder, PlannedModel, read_model
from quantkit.eval.plan.plan import plan_serving
from quantkit.eval.plan.question import Question
from quantkit.eval.plan.roofline import HELPS, Ceiling, stops_helping
from quantkit.eval.plan.source import find_config
from quantkit.eval.plan.weights import WeightPlan, in_format, quantized, unquantized
from quantkit.eval.shapes import PLAIN_SHAPES, SHAPES
from quantkit.recipe import load_recipe
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device import memory as runtime_memory

H200 = GPUS["h200"]
ENGINE_RESULTS = Path(__file__).parents[2] / "eval" / "results" / "engine.csv"
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "mistral-7b": 7_248_023_552,
    "gemma-2-9b": 9_241_705_984,
    "phi-3-mini": 3_821_079_552,
}
KIB_PER_TOKEN = {  # 2 x kv heads x head size x layers x 2 bytes / 1024
    "llama-3.1-8b": 128,
    "llama-3.1-70b": 320,
    "qwen2.5-7b": 56,
    "gemma-2-9b": 336,
    "phi-3-mini": 384,
}


@cache
def model_of(name: str) -> PlannedModel:
    return read_model(*find_config(name))


def decoder_of(model: PlannedModel) -> Decoder:
    assert model.decoder is not None
    return model.decoder


def ceiling(model: PlannedModel, weights: WeightPlan, gpu: Gpu = H200) -> Ceiling:
    return Ceiling(model.cache, decoder_of(model).attention_width, weights, gpu)


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_those_of_the_published_models(name: str, parameters: int) -> None:
    assert decoder_of(model_of(name)).parameters == parameters


def test_llama_8b_by_hand() -> None:
    model = model_of("llama-3.1-8b")
    # q and o 4096 x 4096, k and v 1024 x 4096, gate, up and down 14336 x 4096; two norms
    linear = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    kept = 2 * 128256 * 4096 + 32 * 2 * 4096 + 4096
    plain = unquantized(decoder_of(model))
    assert plain.bytes == 2 * (linear + kept) == 16_060_522_496  # 16.1 GB
    # GPTQ W4 g128: half a byte a weight; a float16 scale and half a byte of zero point for 128 of them; an int32 for
    # every input column of every layer
    columns = 32 * (6 * 4096 + 14336)
    packed = linear // 2 + linear // 128 * 2 + linear // 128 // 2 + 4 * columns
    w4 = quantized(model, load_recipe("gptq-w4g128"))
    assert w4.bytes == packed + 2 * kept
    assert round(w4.bytes / 1e9, 1) == 5.7
    assert w4.linear_bits == pytest.approx(4 + 16 / 128 + 4 / 128, abs=0.01)
    assert model.cache.per_token * 2 == 131_072


def test_cache_by_hand() -> None:
    for name, kib in KIB_PER_TOKEN.items():
        assert model_of(name).cache.per_token * 2 == kib * 1024, name
    llama_70b = model_of("llama-3.1-70b").cache
    assert llama_70b.per_token * 2 * 4096 == 80 * 2 * 8 * 128 * 2 * 4096 == 1_342_177_280  # 1.34 GB
    latent = model_of("deepseek-v3").cache
    assert (latent.kind, latent.per_token * 2) == ("MLA", 61 * (512 + 64) * 2)
    assert latent.per_token * 2 == 70_272


def test_kinds_of_attention() -> None:
    assert {name: model_of(name).cache.kind for name in ("phi-3-mini", "llama-3.1-8b", "deepseek-v3")} == {
        "phi-3-mini": "MHA",
        "llama-3.1-8b": "GQA",
        "deepseek-v3": "MLA",
    }
    single = read_model("m", SHAPES["llama-3.1-8b"] | {"num_key_value_heads": 1}).cache
    assert (single.kind, single.per_layer) == ("MQA", 2 * 128)


def test_sliding_layers_read_their_window_only() -> None:
    gemma = model_of("gemma-2-9b").cache  # every second layer sees 4,096 tokens
    assert gemma.seen(1000) == 42 * 1000
    assert gemma.seen(8192) == 21 * 8192 + 21 * 4096
    pairs = sum(min(position + 1, 4096) for position in range(8192))
    assert gemma.seen_in_prompt(8192) == 21 * 8192 * 8193 // 2 + 21 * pairs
    assert gemma.slides(4097)
    assert not gemma.slides(4096)


@pytest.mark.parametrize("recipe", ["rtn-w4g128", "nf4", "llm-int8", "fp8"])
def test_bytes_are_those_of_a_real_checkpoint(recipe: str, quantized_draft: Callable[..., Path]) -> None:
    folder = quantized_draft(recipe)
    written = sum(stored.nbytes for stored in Checkpoint(folder).tensors.values())
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    planned = quantized(model_of("demo-draft"), load_recipe(recipe)).bytes
    state_text = 8 * 14 if recipe == "nf4" else 0  # bitsandbytes notes each layer's shape as text
    assert abs(planned - written) <= state_text
    assert 0 <= files - planned < 40_000  # names and places of the tensors


def test_the_original_is_planned_as_it_is() -> None:
    stored = sum(tensor.nbytes for tensor in Checkpoint(find_folder("demo")).tensors.values())
    assert unquantized(decoder_of(model_of("demo"))).bytes == stored


def find_folder(name: str) -> Path:
    from quantkit.sources import model_folder

    return model_folder(name)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b", "gemma-2-9b", "tiny"])
def test_the_reserve_is_the_engines_own(name: str, tensor: int) -> None:
    """On this machine's CPU, with the numbers that the engine takes on a GPU."""
    decoder = decoder_of(model_of(name))
    options = EngineOptions(
        device="cpu",
        max_sequences=SEQUENCES,
        step_tokens=STEP_TOKENS,
        kv_tokens=64,
        max_context=32,
        tensor_parallel=tensor,
    )
    planned = runtime_memory.plan_memory(decoder.config, 0, torch.bfloat16, options, available=1 << 40)
    reserve = reserve_of(decoder, tensor)
    assert reserve.total - reserve.graphs == planned.activations + LIBRARIES
    assert reserve.graphs == runtime_memory._graph_bytes(decoder.config, torch.bfloat16, options)
    assert runtime_memory._LIBRARIES == LIBRARIES
    assert fit(H200, unquantized(decoder), reserve, model_of(name).cache, 2, 1).page_bytes == planned.page_bytes


def test_requests_fill_the_memory_and_one_more_would_not() -> None:
    model = model_of("llama-3.1-8b")
    found = fit(H200, unquantized(decoder_of(model)), reserve_of(decoder_of(model)), model.cache, 2, 4000)
    taken = found.weights + found.reserve + found.page_bytes  # the padding page
    each = math.ceil(4000 / 16) * 16 * 131_072
    assert taken + found.requests * each <= 0.9 * 141e9 < taken + (found.requests + 1) * each


def test_decode_step_by_hand() -> None:
    model = model_of("llama-3.1-8b")
    plain = unquantized(decoder_of(model))
    step = ceiling(model, plain).decode(8, 1024)
    weights = 16_060_522_496 - 2 * 128256 * 4096  # of the embedding, a step reads a few rows
    assert step.bytes == weights + 8 * 1024 * 131_072
    assert step.memory_seconds == pytest.approx(step.bytes / 4.8e12)
    operations = 2 * (6_979_321_856 + 128256 * 4096) + 4 * 32 * 128 * 1024 * 32
    assert step.compute_seconds == pytest.approx(8 * operations / 989.5e12)
    assert step.bound == "memory"
    assert step.tokens_per_second == pytest.approx(8 / step.memory_seconds)


def test_where_computing_begins_to_bound() -> None:
    """Below the limit a step is bound by memory, above by arithmetic; a long context never lets it get there."""
    model = model_of("llama-3.1-8b")
    for weights in (unquantized(decoder_of(model)), quantized(model, load_recipe("nf4"))):
        bound = ceiling(model, weights)
        limit = bound.bandwidth_bound_up_to(128)
        assert bound.decode(math.floor(limit), 128).bound == "memory"
        assert bound.decode(math.ceil(limit) + 1, 128).bound == "compute"
        assert math.isinf(bound.bandwidth_bound_up_to(4096))


def test_where_quantization_stops_helping() -> None:
    model = model_of("llama-3.1-70b")
    plain = ceiling(model, unquantized(decoder_of(model)))

    def gain(one: Ceiling, batch: int) -> float:
        return plain.decode(batch, 512).seconds / one.decode(batch, 512).seconds

    weight_only = ceiling(model, quantized(model, load_recipe("gptq-w4g128")))
    stop = stops_helping(weight_only, plain, 512)
    assert stop is not None
    assert gain(weight_only, stop) < HELPS <= gain(weight_only, stop - 1)
    same = math.ceil(plain.bandwidth_bound_up_to(512))
    assert gain(weight_only, same) == pytest.approx(1)  # both wait for the same arithmetic
    eight = ceiling(model, quantized(model, load_recipe("fp8")))
    assert stops_helping(eight, plain, 512) is None
    assert gain(eight, 4096) > 1.5  # twice the rate, apart from lm_head and attention
    old = ceiling(model, quantized(model, load_recipe("fp8")), find_gpu("a100-80"))
    assert old.linear_seconds == pytest.approx(2 * (old.weights.parameters - 128256 * 8192) / 312e12, rel=1e-3)


def test_every_measured_speed_is_below_its_ceiling() -> None:
    """All rows of eval/results/engine.csv whose model, format and GPU are known, by data sheet and as measured."""
    checked = 0
    with ENGINE_RESULTS.open() as file:
        for row in csv.DictReader(file):
            if row.get("speculative"):  # several tokens for one reading of the weights
                continue
            known = recognise(row["gpu"], 1)
            model, weights = _weights_of(row["model"].split(" (")[0], row["format"], row["kv_dtype"])
            if known is None or model is None or weights is None:
                continue
            for bandwidth in {known.bandwidth, 4.46e12 if known.name == "h200" else known.bandwidth}:
                gpu = Gpu(**{**vars(known), "bandwidth": bandwidth})
                bound = ceiling(model, weights, gpu)
                batch, prompt, new = int(row["batch"]), int(row["prompt"]), int(row["new"])
                assert bound.answer_tokens_per_second(batch, prompt, new) > float(row["tokens_per_second"]), row
                step = float(row["step_ms"])  # 0 where there was none in which everybody answered
                assert not step or bound.decode(batch, prompt).seconds * 1e3 < step, row
            checked += 1
    assert checked >= 20


@cache
def _weights_of(name: str, fmt: str, kv_dtype: str) -> tuple[PlannedModel | None, WeightPlan | None]:
    if name not in SHAPES or kv_dtype != "bfloat16":
        return None, None
    model = model_of(name)
    if fmt in ("bf16", "bfloat16"):
        return model, unquantized(decoder_of(model))
    if fmt not in FORMATS:
        return None, None
    return model, in_format(model, fmt, FORMATS[fmt]("bfloat16"))


def test_cost_follows_the_ceiling() -> None:
    model = model_of("llama-3.1-8b")
    asked = Question(batches=(4,), price_per_hour=3.0, efficiency=0.5)
    (plain, _) = plan_serving(model, [load_recipe("nf4")], H200, asked).formats
    speed = plain.speeds[0]
    assert (asked.prompt, asked.new) == (3840, 256)
    seconds = plain.ceiling.prefill_seconds(3840, 4) + 255 * plain.ceiling.decode(4, 3840 + 127).seconds
    assert speed.cost == pytest.approx(3.0 / 3600 * seconds / 0.5 / (4 * 256) * 1e6)


def test_cost_counts_the_prompt_and_the_mean_context() -> None:
    """Steps at the full context and no prompts would be too dear for a long answer, too cheap for a long prompt."""
    costs = {}
    for new in (64, 3840):
        asked = Question(batches=(128,), price_per_hour=1.0, answer=new)
        speed = plan_serving(model_of("llama-3.1-8b"), [], H200, asked).formats[0].speeds[0]
        assert speed.cost is not None
        costs[new] = speed.cost
    decoded_at_the_end = 1.0 / (3600 * speed.step.tokens_per_second) * 1e6
    assert costs[3840] < decoded_at_the_end < costs[64]
    assert Question(context=4096, answer=3840).mean_context == 256 + 1919
    assert (Question(context=100).new, Question(context=1).prompt) == (50, 1)
    assert cost_of_million(Question(), 100.0) is None


def test_smaller_caches_hold_twice_as_much() -> None:
    model = model_of("llama-3.1-8b")
    plans = [plan_serving(model, [], H200, Question(kv_dtype=kind)) for kind in ("auto", "fp8")]
    wide, narrow = (plan.formats[0].fit.tokens for plan in plans)
    assert narrow == pytest.approx(2 * wide, abs=32)


@pytest.mark.parametrize(("kind", "head"), [("fp8", 128), ("int8", 128 + 4), ("int4", 64 + 8)])
def test_bytes_of_a_token_in_every_kind_of_cache(kind: str, head: int) -> None:
    found = plan_serving(model_of("llama-3.1-8b"), [], H200, Question(kv_dtype=kind)).to_dict()["cache"]
    assert found["bytes_per_token"] == 32 * 2 * 8 * head


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_integers_keep_no_latents(kind: str) -> None:
    with pytest.raises(InputError, match="latents"):
        plan_serving(model_of("deepseek-v2-lite"), [], H200, Question(kv_dtype=kind))


def test_shapes_that_can_be_filled_are_of_known_families() -> None:
    assert {"tiny", "llama-3.1-8b", "qwen2.5-1.5b"} <= set(PLAIN_SHAPES)
    assert all(config["model_type"] in FAMILIES for config in PLAIN_SHAPES.values())
    assert "deepseek-v3" not in PLAIN_SHAPES


@pytest.mark.parametrize("gpu", GPUS.values(), ids=str)
def test_data_sheets_are_plausible(gpu: Gpu) -> None:
    """A slip of a digit shows: GPUs differ little in operations a byte, and in what 8 bits gain."""
    assert 70 < gpu.bf16 / gpu.bandwidth < 450
    assert all(rate is None or 1.9 < rate / gpu.bf16 < 4.1 for rate in (gpu.fp8, gpu.int8))
    assert all(recognise(name, 7) == Gpu(**{**vars(gpu), "memory": 7, "source": _SOURCE}) for name in gpu.reported)


_SOURCE = "memory as the driver reports it, the rest from the data sheet"
