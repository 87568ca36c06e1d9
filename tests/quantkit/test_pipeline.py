"""quantize and load_reference: every bundled recipe, end to end on a tiny model."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import quantkit
from quantkit.arch import LLAMA
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.inspection import inspect_checkpoint
from quantkit.pipeline.verification import fingerprint
from quantkit.recipe import list_recipes

Quantized = Callable[..., tuple[Path, Any]]
RECIPES = [recipe.name for recipe in list_recipes() if not recipe.needs_data]
IDS = torch.arange(3, 99)[None]


def contents(file: Path) -> bytes:
    """The bytes of a file; seconds are left out, which no two runs share."""
    return re.sub(rb'"seconds": [0-9.]+', b"", file.read_bytes())


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return quantkit.load_reference(folder, dtype="float32")(IDS).logits


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_writes_what_it_reads_back(recipe: str, tiny_model: Path, reported_tiny: Quantized) -> None:
    folder, report = reported_tiny(recipe)
    assert len(report.layers) == 14
    written = Checkpoint(folder)
    source = Checkpoint(tiny_model)
    for layer in report.layers:
        decoded = written.quantized(layer.module).dequantize()
        original = source.tensor(f"{layer.module}.weight").float()
        assert float((decoded - original).norm() / original.norm()) == pytest.approx(layer.relative_error, rel=1e-5)
    for name in source.tensors:
        if name.removesuffix(".weight") not in written.formats:
            assert torch.equal(written.tensor(name), source.tensor(name)), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_reference_logits_equal_a_model_patched_by_hand(
    recipe: str, tiny_model: Path, reported_tiny: Quantized
) -> None:  # fmt: skip
    folder, _ = reported_tiny(recipe)
    by_hand = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    written = Checkpoint(folder)
    for modules in itertools.chain(*LLAMA.fused_linears(written.config)):
        fmt = written.formats[modules[0]]
        for together in [modules] if fmt.scales_tensor else [(module,) for module in modules]:
            linears = [by_hand.get_submodule(module) for module in together]
            whole = fmt.quantize(torch.cat([linear.weight.data for linear in linears])).dequantize()
            for linear, weight in zip(linears, whole.split([len(each.weight) for each in linears]), strict=True):
                linear.weight.data = weight
    with torch.no_grad():
        expected = by_hand(IDS).logits
    assert torch.allclose(logits_of(folder), expected, rtol=1e-5, atol=1e-5)


def test_fewer_bits_lose_more(reported_tiny: Quantized) -> None:
    errors = []
    for recipe in ("rtn-w8", "rtn-w4g128", "rtn-w3g128", "rtn-w2g64"):
        _, report = reported_tiny(recipe)
        errors.append(sum(layer.relative_error for layer in report.layers))
    assert errors == sorted(errors)
    assert errors[0] < 0.1 * errors[1]


def test_bits_per_weight_count_scales(reported_tiny: Quantized) -> None:
    folder, report = reported_tiny("rtn-w4g128-ct")
    shape_bytes = 16 * len(report.layers)  # weight_shape: two int64
    weights = sum(layer.weights for layer in report.layers)
    assert report.bits_per_weight == pytest.approx(4 + 16 / 128 + 8 * shape_bytes / weights)
    assert inspect_checkpoint(folder).quantized_bits_per_weight == pytest.approx(report.bits_per_weight)


def test_sharded_output_is_the_same_model(tiny_model: Path, reported_tiny: Quantized, tmp_path: Path) -> None:
    quantkit.quantize(tiny_model, "nf4", tmp_path / "many", shard_bytes=100_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert torch.equal(logits_of(reported_tiny("nf4")[0]), logits_of(tmp_path / "many"))


def test_two_runs_write_the_same_bytes(tiny_model: Path, reported_tiny: Quantized, tmp_path: Path) -> None:
    first, _ = reported_tiny("rtn-w4g128")
    quantkit.quantize(tiny_model, "rtn-w4g128", tmp_path / first.name, quality_windows=0)
    files = sorted(file.name for file in first.iterdir())
    assert len(files) > 4
    assert sorted(file.name for file in (tmp_path / first.name).iterdir()) == files
    assert all(contents(first / name) == contents(tmp_path / first.name / name) for name in files)


def test_config_carries_what_readers_want(reported_tiny: Quantized) -> None:
    folder, _ = reported_tiny("rtn-w4g128")
    config = json.loads((folder / "config.json").read_text())
    wanted = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}
    assert wanted.items() <= config["quantization_config"].items()
    assert json.loads((folder / "quantize_config.json").read_text()) == config["quantization_config"]


def test_fingerprint_sees_swaps_and_single_bits() -> None:
    weight = torch.randn(64, 64)
    swapped = weight.clone()
    swapped[3, 4], swapped[5, 6] = weight[5, 6], weight[3, 4]
    nudged = weight.clone()
    nudged[7, 7] = torch.nextafter(weight[7, 7], torch.tensor(9.0))
    assert len({fingerprint(weight), fingerprint(swapped), fingerprint(nudged)}) == 3


def test_gptq_log_and_losses(tmp_path: Path) -> None:
    """Every layer loses less than plain rounding would, and the log says what was seen."""
    calibration = Calibration(samples=4, seq_len=128)
    report = quantkit.quantize(
        "demo-draft", "gptq-w3g128", tmp_path / "out", calibration=calibration, quality_windows=0
    )
    assert all(layer.log["loss"] < layer.log["rounding_loss"] for layer in report.layers)
    lines = [json.loads(line) for line in (tmp_path / "out" / "quantization_log.jsonl").read_text().splitlines()]
    assert lines[0]["calibration"] == report.calibration
    assert lines[0]["calibration"]["samples"] == 4
    assert len(lines[0]["calibration"]["tokens_sha256"]) == 64
    assert [line["module"] for line in lines[1:]] == [layer.module for layer in report.layers]


@pytest.mark.long
def test_calibration_is_repeatable_and_seeded(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        calibration = Calibration(samples=2, seq_len=64, seed=seed)
        quantkit.quantize("demo-draft", "gptq-w4g128", tmp_path / name, calibration=calibration, quality_windows=0)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
