"""Automatic bits: what is measured, what is decided, and what a checkpoint then says."""

import json
from pathlib import Path

import pytest

import quantkit
from quantkit.calibration import Calibration
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.formats import CtPacked
from quantkit.methods.sensitivity import Sensitivity, candidates, probe_for
from quantkit.pipeline.allocation import choose_formats, formats_from_record
from quantkit.pipeline.job import Job, prepare
from quantkit.recipe import load_recipe

FEW = Calibration(samples=3, seq_len=32)


def job(*changes: str) -> Job:
    return prepare("demo", load_recipe("auto-w3.5", changes), FEW, "cpu", 1 << 30, 0)


def test_candidates_fit_the_layer() -> None:
    fmt = CtPacked(bits=4, group_size=64)
    assert {each.group_size for each in candidates(fmt, 256)} == {128, 64, 32}
    assert {each.group_size for each in candidates(fmt, 96)} == {32}
    assert {each.group_size for each in candidates(fmt, 100)} == {-1}
    assert probe_for(fmt, 256, 3.5) == CtPacked(bits=3, group_size=64)
    assert probe_for(fmt, 96, 2.5) == CtPacked(bits=2, group_size=32)


def test_divergence_follows_the_error() -> None:
    fine, coarse = CtPacked(bits=4, group_size=64), CtPacked(bits=3, group_size=64)
    group = Sensitivity(("a",), coarse, 0.5, {coarse: 2.0, fine: 0.4})
    assert group.divergence(coarse) == 0.5
    assert group.divergence(fine) == pytest.approx(0.1)


def test_decision_is_repeatable_and_within_the_budget(tmp_path: Path) -> None:
    first, again = (choose_formats(job(), tmp_path) for _ in range(2))
    assert first.record == again.record
    assert first.record["bits_per_weight"] <= 3.5
    assert formats_from_record(json.loads(json.dumps(first.record)), job().plan) == first.formats
    assert len({fmt.bits for fmt in first.formats.values()}) > 1
    for group in job().family.linear_groups(job().source.config):
        assert len({first.formats[module] for module in group}) == 1
    assert all(group["kl"] >= 0 for group in first.record["groups"])
    assert not list(tmp_path.iterdir())


def test_target_out_of_reach(tmp_path: Path) -> None:
    """Two bits and their scales are more than 2.0; the recipe itself refuses targets outside 2 to 8."""
    with pytest.raises(InputError, match=r"target_bits is 2, .* scales and all; choose a number in between"):
        choose_formats(job("target_bits=2.0"), tmp_path)


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_written_checkpoint_mixes_schemes(method: str, tmp_path: Path) -> None:
    recipe = load_recipe("auto-w3.5", [f"method={method}", "target_bits=3.75"])
    report = quantkit.quantize("demo", recipe, tmp_path / "out", calibration=FEW, quality_windows=0)
    assert report.bits_per_weight <= 3.75
    assert report.bits_per_weight > 3.5
    written = Checkpoint(tmp_path / "out").formats
    assert len(set(written.values())) > 1
    log = json.loads((tmp_path / "out" / "quantization_log.jsonl").read_text().splitlines()[0])
    assert log["allocation"]["target_bits"] == 3.75
    assert {module for group in log["allocation"]["groups"] for module in group["modules"]} == set(written)
