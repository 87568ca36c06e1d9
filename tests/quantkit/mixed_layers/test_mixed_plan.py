"""What is asked about a model whose layers differ: a plan, an inspection, errors, and whether the runtime runs it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import quantkit
from long_cases import others_long
from quantkit.arch import Family
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.eval.quality.layer_errors import layer_errors
from quantkit.inspection import inspect_checkpoint
from quantkit.pipeline.job import prepare
from quantkit.planning import make_plan
from quantkit.runtime.model.config import read_model_config

LAYERS = 3
FEW = Calibration(samples=6, seq_len=32)
Quantized = Callable[[str], tuple[Path, Any]]


@pytest.mark.parametrize("recipe", others_long(["rtn-w4g32", "gptq-w4g32", "awq-w4g32"], ["rtn-w4g32"]))
def test_plan_and_inspect_know_the_sizes(recipe: str, source: Path, quantized: Quantized, family: Family) -> None:
    folder, report = quantized(recipe)
    plan = make_plan(prepare(source, recipe, folder.with_name("none"), calibration=FEW, quality_windows=0))
    written = inspect_checkpoint(folder)
    linears = family.linears(Checkpoint(source).config)
    assert [scheme.layers for scheme in plan.output.schemes] == [len(linears)] == list(written.schemes.values())
    assert plan.output.bytes == report.bytes == written.bytes
    assert plan.model.parameters == written.parameters
    assert plan.output.kept == ()
    assert plan.needs.seconds > 0
    layers = [written.layer_bytes[f"layer {layer}"] for layer in range(LAYERS)]
    assert layers[0] < layers[1] == layers[2]


def test_a_dry_run_takes_the_same_road(
    source: Path, family: Family, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    few = ("--samples", FEW.samples, "--seq-len", FEW.seq_len)
    code, out, err = run_cli("quantize", source, "-r", "gptq-w4g32", "-o", source.parent / "none", "--dry-run", *few)
    assert code == 0, err
    assert f"{len(family.linears(Checkpoint(source).config))} layers" in out


def test_experts_must_share_a_scheme(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text(
        "summary: mixed\nmethod: rtn\nformat: {name: ct-packed, bits: 4, group_size: 32}\n"
        "overrides: [{modules: '*.experts.2.*', bits: 8}]\n"
    )
    with pytest.raises(InputError, match=r"1\.mlp\.experts\.0\.gate_proj would be W4 .*experts\.2\.gate_proj would be"):
        quantkit.quantize(source, str(file), tmp_path / "out")


def test_errors_of_layers_that_differ(source: Path, quantized: Quantized, family: Family, tokens: Tensor) -> None:
    same = layer_errors(source, source, tokens[:2])
    assert {error for errors in same.linears.values() for error in errors} == {0.0}
    scaled = layer_errors(source, quantized("awq-w4g32")[0], tokens[:2])
    assert set(scaled.linears) == {name.rpartition(".")[2] for name in family.linears(Checkpoint(source).config)}
    assert all(len(errors) == LAYERS for errors in scaled.linears.values())
    assert all(error is not None and 0 < error < 0.3 for errors in scaled.linears.values() for error in errors)


def test_the_runtime_refuses_in_one_line(source: Path) -> None:
    with pytest.raises(InputError, match=r"'mixed_layers' cannot be run: layer 0 consists of q_a_kv, q_b") as error:
        read_model_config(Checkpoint(source).config)
    assert "\n" not in str(error.value)
