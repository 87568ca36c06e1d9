"""Models of a shape at random, as files keep them, and what a run on one says."""

import json
import sys
from pathlib import Path

import pytest

from quantkit.arch import FAMILIES
from quantkit.checkpoint import Checkpoint
from quantkit.eval import scale
from quantkit.skeleton import check_blocks


@pytest.mark.parametrize("shape", ["tiny", "tiny-experts"])
def test_a_model_is_stored_as_published_ones_are(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "SHARD_BYTES", 1 << 20)
    folder = scale.make_model(shape, tmp_path / "model", blocks=1)
    checkpoint = Checkpoint(folder)
    check_blocks(checkpoint, FAMILIES[checkpoint.config["model_type"]])
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert ("model.layers.0.mlp.experts.3.down_proj.weight" in checkpoint.tensors) == (shape == "tiny-experts")


def test_a_run_says_seconds_and_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["tiny-experts", "rtn-w4g128", "--device", "cpu", "--blocks", "1", "--quality-windows", "0"]
    monkeypatch.setattr(sys, "argv", ["scale", *given])
    scale.main()
    row = json.loads(capsys.readouterr().out)
    assert (row["shape"], row["recipe"], row["layers"]) == ("tiny-experts", "rtn-w4g128", 4 + 4 * 3)
    assert row["seconds"] > 0
    assert row["peak_resident_gib"] > row["peak_gpu_gib"] == 0
