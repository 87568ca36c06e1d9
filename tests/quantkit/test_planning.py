"""make_plan: exact sizes against what quantize writes, estimates that move the right way, warnings that are true."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import quantkit
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import CtPacked, Gptq, Nf4
from quantkit.inspection import inspect_checkpoint
from quantkit.methods.costing import GroupWork
from quantkit.methods.gptq import GptqMethod
from quantkit.methods.rtn import RtnMethod
from quantkit.planning import QuantizePlan, describe, layer_bytes, make_plan
from quantkit.planning.costs import Work, peak_memory
from quantkit.recipe import list_recipes, load_recipe

DATA_FREE = [recipe.name for recipe in list_recipes() if not recipe.needs_data]
STATE_TEXT = 8  # bytes a layer: bitsandbytes keeps a JSON text whose length depends on the digits of a float


@dataclass(frozen=True)
class TuningMethod(GptqMethod):
    """Would learn through blocks."""

    @property
    def tunes_blocks(self) -> bool:
        return True


def plan_for(
    model: Path, recipe: str, *changes: str, samples: int = 16, seq_len: int = 128, output: Path | None = None
) -> QuantizePlan:
    loaded = load_recipe(recipe, changes)
    return make_plan(Checkpoint(model), loaded, samples=samples, seq_len=seq_len, device="cpu", output=output)


@pytest.mark.parametrize("recipe", DATA_FREE)
def test_sizes_are_those_of_the_written_checkpoint(recipe: str, tiny_model: Path, tmp_path: Path) -> None:
    plan = plan_for(tiny_model, recipe)
    report = quantkit.quantize(tiny_model, recipe, tmp_path / "out")
    slack = STATE_TEXT * len(report.layers) if plan.output.format in ("nf4", "fp4") else 0
    assert abs(plan.output.bytes - report.bytes) <= slack
    assert plan.model.bytes == report.source_bytes
    written = inspect_checkpoint(tmp_path / "out")
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
    assert [verdict.engine for verdict in plan.engines if not verdict.loads] == ["SGLang"]


def test_target_bits_give_the_size_and_a_mix_for_the_engines(tiny_model: Path) -> None:
    plan = plan_for(tiny_model, "rtn-w4g128-ct", "target_bits=3.5", "method=gptq")
    weights = sum(scheme.weights for scheme in plan.output.schemes)
    plain = plan.output.bytes - round(3.5 * weights / 8)
    exact = plan_for(tiny_model, "rtn-w4g128-ct")
    assert plain == exact.output.bytes - sum(scheme.bytes for scheme in exact.output.schemes)
    assert plan.output.bits_per_weight == pytest.approx(3.5, abs=1e-4)
    assert "SGLang" in [verdict.engine for verdict in plan.engines if not verdict.loads]


@pytest.mark.parametrize("fmt", [Gptq(), Gptq(bits=3), CtPacked(bits=4, sym=False), Nf4(double_quant=False)])
def test_layer_bytes_are_those_of_the_packed_parts(fmt: Gptq | CtPacked | Nf4) -> None:
    parts = fmt.encode(torch.randn(256, 384))
    assert layer_bytes(fmt, (256, 384)) == pytest.approx(sum(part.nbytes for part in parts.values()), abs=STATE_TEXT)


def test_plans_are_json_and_have_no_path_of_this_machine(tiny_model: Path, tmp_path: Path) -> None:
    plan = plan_for(tiny_model, "gptq-w4g128", output=tmp_path / "deep" / "out")
    text = json.dumps(plan.to_dict())
    assert str(tiny_model.parent) not in text
    assert json.loads(text)["method"]["options"]["order"] == "static"
    assert json.loads(text)["needs"]["disk"]["available"] > 0


def test_memory_and_disk_grow_with_the_calibration_data(tiny_model: Path) -> None:
    few, many = (plan_for(tiny_model, "gptq-w4g128", samples=samples) for samples in (16, 1024))
    states = 1008 * 128 * 256 * 4
    assert many.needs.ram.needed - few.needs.ram.needed >= states
    assert many.needs.disk.needed - few.needs.disk.needed >= states
    assert few.output == many.output


def test_data_free_methods_take_no_more_for_more_samples(tiny_model: Path) -> None:
    few, many = (plan_for(tiny_model, "rtn-w4g128", samples=samples) for samples in (1, 4096))
    assert few.needs.ram.needed == many.needs.ram.needed
    assert few.needs.disk == many.needs.disk
    assert not few.method.calibrated


def test_calibration_costs_more_time_and_memory_than_rounding(tiny_model: Path) -> None:
    rounding, gptq = (plan_for(tiny_model, name, samples=256) for name in ("rtn-w4g128", "gptq-w4g128"))
    assert gptq.needs.seconds > rounding.needs.seconds > 0
    assert gptq.needs.ram.needed > rounding.needs.ram.needed


def test_peak_memory_of_a_large_model_is_a_block_not_the_model() -> None:
    """A 70 B model: 80 blocks of hidden 8192, intermediate 28672; 128 x 512 tokens."""
    fmt = Gptq()
    sizes = ((8192, (8192, 1024, 1024)), (8192, (8192,)), (8192, (28672, 28672)), (28672, (8192,)))
    block = tuple(GroupWork(inputs, layers, fmt) for inputs, layers in sizes)
    work = Work(
        blocks=(block,) * 80,
        heads=64,
        eager=False,
        dtype="bfloat16",
        source_bytes=141 * 10**9,
        output_bytes=40 * 10**9,
        shard_bytes=10**9,
        method=GptqMethod(),
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
    assert peak_memory(replace(work, method=TuningMethod())).scratch == 2 * one.scratch  # with a block's targets


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
    short, long = (
        plan_for(tmp_path / "gemma", "gptq-w4g128", samples=4096 // length, seq_len=length) for length in (256, 2048)
    )
    assert long.needs.ram.needed - short.needs.ram.needed > 4 * 4 * 2048**2  # one float32 for each pair of tokens


def test_warnings_name_what_is_certain(tiny_model: Path) -> None:
    assert plan_for(tiny_model, "rtn-w4g128").warnings == ()
    assert plan_for(tiny_model, "gptq-w4g128").warnings == ()
    (rounding,) = plan_for(tiny_model, "rtn-w2g64").warnings
    assert "2 bits" in rounding
    (few,) = plan_for(tiny_model, "gptq-w4g128", samples=1).warnings
    assert "128 calibration tokens" in few
    assert "at least 3 samples" in few
    (context,) = plan_for(tiny_model, "gptq-w4g128", seq_len=1024).warnings
    assert "2 to 256" in context
    (none,) = plan_for(tiny_model, "gptq-w4g128", samples=0).warnings
    assert "0 samples" in none


def test_description_says_what_matters(tiny_model: Path) -> None:
    lines = describe(plan_for(tiny_model, "gptq-w3g128", output=tiny_model.parent / "out"))
    said = dict(lines)
    assert "14 layers" in said["layers"]
    assert "W3 g128 sym" in said["layers"]
    assert "free" in said["disk"]
    assert said["time"].startswith("about ")
    assert [text.partition(":")[0] for label, text in lines if label == "not in"] == ["SGLang"]
    assert [text.split()[0] for label, text in lines if label == "loads in"] == ["quantkit", "transformers", "vLLM"]


def test_what_a_run_would_refuse_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="group size"):
        plan_for(tiny_model, "rtn-w4g128", "format.group_size=96")
    quantkit.quantize(tiny_model, "rtn-w4g128", tmp_path / "out")
    with pytest.raises(InputError, match="quantized already"):
        plan_for(tmp_path / "out", "rtn-w4g128")
    with pytest.raises(InputError, match="device 'tpu'"):
        make_plan(Checkpoint(tiny_model), load_recipe("rtn-w4g128"), samples=1, seq_len=8, device="tpu")


@pytest.mark.gpu
def test_on_a_gpu_the_block_lies_there(tiny_model: Path) -> None:
    recipe = load_recipe("gptq-w4g128")
    plan = make_plan(Checkpoint(tiny_model), recipe, samples=16, seq_len=128, device="cuda")
    assert plan.needs.gpu is not None
    assert 0 < plan.needs.gpu.needed < (plan.needs.gpu.available or 0)
    assert plan.needs.seconds > 0
    assert "GPU memory" in dict(describe(plan))
