"""make_plan: exact sizes against what quantize writes, estimates that move the right way, warnings that are true."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import quantkit
from quantkit.bundled import CALIBRATION_TEXT
from quantkit.calibration import Calibration
from quantkit.formats import Gptq
from quantkit.inspection import inspect_checkpoint
from quantkit.methods.best import BestMethod
from quantkit.methods.costing import EXPERT_RUNS, GroupWork, Speed
from quantkit.methods.gptq import GptqMethod
from quantkit.methods.rtn import RtnMethod
from quantkit.passes.experts import expert_bytes
from quantkit.pipeline.job import prepare
from quantkit.planning import QuantizePlan, describe, make_plan
from quantkit.planning.costs import Work, _measuring_seconds, estimated_seconds, peak_memory
from quantkit.recipe import list_recipes, load_recipe
from quantkit.sources import model_folder
from quantkit.working_memory import how_many_together

DATA_FREE = [recipe.name for recipe in list_recipes() if not recipe.needs_data]
STATE_TEXT = 8  # bytes a layer: bitsandbytes keeps a JSON text whose length depends on the digits of a float


@dataclass(frozen=True)
class TuningMethod(GptqMethod):
    """Would learn through blocks."""

    @property
    def tunes_blocks(self) -> bool:
        return True


def with_tokenizer(model: Path) -> Path:
    """Plans read calibration text, but run no model: any tokenizer will do, and a short text is soon read."""
    for file in model_folder("demo-draft").glob("*token*"):
        shutil.copy(file, model)
    (model.parent / "notes.txt").write_text(CALIBRATION_TEXT.read_text(encoding="utf-8")[:40_000])
    return model


@pytest.fixture(scope="module")
def readable(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer."""
    return with_tokenizer(Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("planned") / "tiny")))


def plan_for(
    model: Path, recipe: str, *changes: str, samples: int = 16, seq_len: int = 128, output: Path | None = None
) -> QuantizePlan:
    output = output or model.parent / "never-written"
    data = Calibration(model.parent / "notes.txt", samples, seq_len)
    job = prepare(model, load_recipe(recipe, changes), output, calibration=data, device="cpu", quality_windows=0)
    return make_plan(job)


@pytest.mark.parametrize("recipe", DATA_FREE)
def test_sizes_are_those_of_the_written_checkpoint(
    recipe: str, tiny_model: Path, reported_tiny: Callable[..., tuple[Path, Any]]
) -> None:
    plan = plan_for(tiny_model, recipe)
    folder, report = reported_tiny(recipe)
    slack = STATE_TEXT * len(report.layers) if plan.output.format in ("nf4", "fp4") else 0
    assert abs(plan.output.bytes - report.bytes) <= slack
    assert plan.model.bytes == report.source_bytes
    written = inspect_checkpoint(folder)
    assert plan.output.bits_per_weight == pytest.approx(written.quantized_bits_per_weight, rel=1e-3 if slack else 1e-12)
    assert plan.model.parameters == written.parameters
    assert plan.engines == written.engines


def test_mixed_schemes_are_counted_apart(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text(
        "summary: mixed\nmethod: rtn\nformat: {name: ct-packed, bits: 4, group_size: 128}\n"
        "keep: ['model.layers.0.*']\noverrides: [{modules: '*.mlp.down_proj', bits: 8}]\n"
    )
    plan = plan_for(tiny_model, str(file))
    assert [(s.scheme, s.layers) for s in plan.output.schemes] == [("W4 g128 sym", 6), ("W8 g128 sym", 1)]
    assert [s.weights for s in plan.output.schemes][1] == 256 * 384
    assert len(plan.output.kept) == 7
    report = quantkit.quantize(tiny_model, str(file), tmp_path / "out")
    assert plan.output.bytes == report.bytes
    assert [verdict.engine for verdict in plan.engines[:4] if not verdict.loads] == ["SGLang"]


def test_target_bits_give_the_size_and_a_mix_for_the_engines(readable: Path) -> None:
    plan = plan_for(readable, "rtn-w4g128-ct", "target_bits=3.5", "method=gptq")
    weights = sum(scheme.weights for scheme in plan.output.schemes)
    plain = plan.output.bytes - round(3.5 * weights / 8)
    exact = plan_for(readable, "rtn-w4g128-ct")
    assert plain == exact.output.bytes - sum(scheme.bytes for scheme in exact.output.schemes)
    assert plan.output.bits_per_weight == pytest.approx(3.5, abs=1e-4)
    assert "SGLang" in [verdict.engine for verdict in plan.engines if not verdict.loads]


def test_of_few_target_bits_some_layers_take_fewer_than_4(readable: Path) -> None:
    """vLLM has no kernels for these with zero points."""
    refusing = {}
    for bits in (3.5, 4.5):
        plan = plan_for(readable, "rtn-w4g128-ct", f"target_bits={bits}", "method=gptq", "format.sym=false")
        refusing[bits] = [verdict.engine for verdict in plan.engines[:4] if not verdict.loads]
    assert refusing == {3.5: ["vLLM", "SGLang"], 4.5: ["SGLang"]}


def test_plans_are_json_and_have_no_path_of_this_machine(readable: Path, tmp_path: Path) -> None:
    plan = plan_for(readable, "gptq-w4g128", output=tmp_path / "deep" / "out")
    text = json.dumps(plan.to_dict())
    assert str(readable.parent) not in text
    assert json.loads(text)["method"]["options"]["order"] == "static"
    assert json.loads(text)["needs"]["disk"]["available"] > 0


def test_memory_and_disk_grow_with_the_calibration_data(readable: Path) -> None:
    few, many = (plan_for(readable, "gptq-w4g128", samples=samples) for samples in (16, 64))
    states = 48 * 128 * 256 * 4
    assert many.needs.ram.needed - few.needs.ram.needed >= states
    assert many.needs.disk.needed - few.needs.disk.needed >= states
    assert few.output == many.output


def test_data_free_methods_take_no_more_for_more_samples(tiny_model: Path) -> None:
    few, many = (plan_for(tiny_model, "rtn-w4g128", samples=samples) for samples in (1, 4096))
    assert few.needs.ram.needed == many.needs.ram.needed
    assert few.needs.disk.needed == many.needs.disk.needed
    assert not few.method.calibrated


def test_calibration_costs_more_time_and_memory_than_rounding(readable: Path) -> None:
    rounding, gptq = (plan_for(readable, name, samples=64) for name in ("rtn-w4g128", "gptq-w4g128"))
    assert gptq.needs.seconds > rounding.needs.seconds > 0
    assert gptq.needs.ram.needed > rounding.needs.ram.needed


def test_a_choice_of_three_costs_what_all_of_them_cost(readable: Path) -> None:
    awq, best = (plan_for(readable, "best-w4g128", *changes) for changes in (("method=awq",), ()))
    assert 1.5 * awq.needs.seconds < best.needs.seconds < 8 * awq.needs.seconds
    assert best.needs.ram.needed > awq.needs.ram.needed
    assert best.output == awq.output


def test_peak_memory_of_a_large_model_is_a_block_not_the_model() -> None:
    """A 70 B model: 80 blocks of hidden 8192, intermediate 28672; 128 x 512 tokens."""
    fmt = Gptq()
    sizes = ((8192, (8192, 1024, 1024)), (8192, (8192,)), (8192, (28672, 28672)), (28672, (8192,)))
    block = tuple(GroupWork(inputs, layers, fmt) for inputs, layers in sizes)
    work = Work(
        blocks=(block,) * 80,
        hidden=8192,
        heads=64,
        eager=False,
        dtype="bfloat16",
        source_bytes=141 * 10**9,
        output_bytes=40 * 10**9,
        shard_bytes=10**9,
        method=GptqMethod(target="layer"),
        samples=128,
        seq_len=512,
        device="cpu",
    )
    one = peak_memory(work)
    assert peak_memory(replace(work, blocks=work.blocks * 2)) == one
    block_bytes = 4 * sum(group.weights for group in block)
    largest_hessian = 4 * 28672**2
    assert block_bytes + 3 * largest_hessian < one.ram < 40e9
    assert peak_memory(replace(work, method=RtnMethod(), samples=0)).ram < 6e9
    assert one.scratch == work.hidden_bytes
    for comparing in (TuningMethod(target="layer"), BestMethod(target="layer")):  # inputs and targets beside the states
        assert peak_memory(replace(work, method=comparing)).scratch == 3 * one.scratch
    assert peak_memory(replace(work, method=BestMethod())).scratch == 5 * one.scratch  # what its twin reads, twice
    followed = peak_memory(replace(work, method=GptqMethod(target="model")))
    assert followed.scratch == 2 * one.scratch  # states of the original, beside its block
    assert one.ram + block_bytes < followed.ram < one.ram + 1.2 * block_bytes


def test_measuring_bits_takes_longer_the_more_blocks_come_after_a_group() -> None:
    """Every group's stream runs through all blocks after its own: twice the blocks, four times these runs."""
    block = (GroupWork(256, (512, 512), Gptq()), GroupWork(512, (256,), Gptq()))
    work = Work((block,) * 8, 256, 4, False, "bfloat16", 10**6, 10**6, 10**6, RtnMethod(), 16, 128, "cpu")
    forward = Speed(torch.device("cpu"), 1e9, math.inf, 0.0, lambda name, call: 0.0)
    half, whole = (_measuring_seconds(replace(work, blocks=(block,) * count), forward) for count in (64, 128))
    assert 3 < whole / half < 4
    kept = replace(work, blocks=((block[0], replace(block[1], fmt=None)),) * 8)
    assert _measuring_seconds(kept, forward) < 0.7 * _measuring_seconds(work, forward)
    rounding = replace(forward, product_flops=math.inf, rounding_seconds=1e-6)
    assert _measuring_seconds(work, rounding) == pytest.approx(8 * 1e-6 * sum(group.weights for group in block))
    asked = estimated_seconds(replace(work, measures_bits=True)), estimated_seconds(work)
    assert asked[0] > asked[1]


def test_experts_count_in_whichever_block_they_stand() -> None:
    """All weights of a block and what its experts read, but the statistics of as many as are rounded together."""
    fmt = Gptq()
    dense = (GroupWork(256, (512, 512), fmt), GroupWork(512, (256,), fmt))
    experts = tuple(replace(group, experts=64, per_token=2) for group in dense)
    work = Work(
        blocks=(dense, dense),
        hidden=256,
        heads=4,
        eager=False,
        dtype="bfloat16",
        source_bytes=10**6,
        output_bytes=10**6,
        shard_bytes=10**6,
        method=GptqMethod(target="layer"),
        samples=16,
        seq_len=128,
        device="cpu",
    )
    first, last = (peak_memory(replace(work, blocks=blocks)) for blocks in ((experts, dense), (dense, experts)))
    assert first == last
    assert how_many_together(torch.device("cpu"), expert_bytes(256, 512)) == 5
    more = 63 * 5 * sum(group.weights for group in dense) + work.hidden_bytes + 4 * expert_bytes(256, 512)
    assert 1.0 < (first.ram - peak_memory(work).ram) / more < 1.4
    assert experts[0].forward_weights == 2 * EXPERT_RUNS * dense[0].forward_weights
    assert experts[0].share == 2 / 64


def test_attention_computed_in_full_costs_its_scores(tmp_path: Path) -> None:
    config = Gemma2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=64,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    with_tokenizer(tmp_path / "gemma")
    short, long = (
        plan_for(tmp_path / "gemma", "gptq-w4g128", samples=4096 // length, seq_len=length) for length in (256, 2048)
    )
    assert long.needs.ram.needed - short.needs.ram.needed > 4 * 4 * 2048**2  # one float32 for each pair of tokens


def test_warnings_name_what_is_certain(readable: Path) -> None:
    assert plan_for(readable, "rtn-w4g128").warnings == ()
    assert plan_for(readable, "gptq-w4g128").warnings == ()
    (rounding,) = plan_for(readable, "rtn-w2g64").warnings
    assert "2 bits" in rounding
    (few,) = plan_for(readable, "gptq-w4g128", samples=1).warnings
    assert "128 calibration tokens" in few
    assert "at least 3 samples" in few


def test_description_says_what_matters(readable: Path) -> None:
    lines = describe(plan_for(readable, "gptq-w3g128", output=readable.parent / "out"))
    said = dict(lines)
    assert "14 layers" in said["layers"]
    assert "W3 g128 sym" in said["layers"]
    assert "free" in said["disk"]
    assert said["time"].startswith("about ")
    refused = ["SGLang", "TensorRT-LLM", "TGI", "llama.cpp", "Ollama"]
    assert [text.partition(":")[0] for label, text in lines if label == "not in"] == refused
    assert [text.split()[0] for label, text in lines if label == "loads in"] == ["quantkit", "transformers", "vLLM"]


@pytest.mark.gpu
def test_on_a_gpu_the_block_lies_there(readable: Path) -> None:
    data = Calibration(samples=16, seq_len=128)
    plan = make_plan(prepare(readable, "gptq-w4g128", readable.parent / "out", calibration=data, device="cuda"))
    assert plan.needs.gpu is not None
    assert 0 < plan.needs.gpu.needed < (plan.needs.gpu.available or 0)
    assert plan.needs.seconds > 0
    assert "GPU memory" in dict(describe(plan))
