"""Checkpoints that other tools wrote, read by us: tiny ones in tests/golden, larger ones beside the repository."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantkit import load_reference
from quantkit.checkpoint import Checkpoint
from quantkit.inspection import inspect_checkpoint

TINY = Path(__file__).parents[1] / "golden"
BESIDE = Path(__file__).parents[3] / "shared" / "golden"
# Relative error of logits: bfloat16's own, and where the other tool rounds activations as well, more.
ROUNDED = {"int8": 2.5e-2, "w8a8": 2.5e-2, "fp8": 6e-2}
FOLDERS = [folder for root in (TINY, BESIDE) for folder in sorted(root.glob("*/")) if (folder / "config.json").exists()]


def tolerance(name: str) -> float:
    return ROUNDED.get(name.lower().rpartition("-")[2], 1e-2)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.parent.name}-{folder.name}")
def test_logits(folder: Path) -> None:
    expected = load_file(folder / "expected.safetensors")
    with torch.no_grad():
        logits = load_reference(folder, dtype="float32")(expected["input_ids"]).logits
    error = (logits - expected["logits"]).norm() / expected["logits"].norm()
    assert float(error) < tolerance(folder.name)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.parent.name}-{folder.name}")
def test_inspect(folder: Path) -> None:
    found = inspect_checkpoint(folder)
    base = inspect_checkpoint(
        next(other for other in FOLDERS if other.parent == folder.parent and "base" in other.name)
    )
    assert found.parameters == base.parameters
    assert sum(found.part_bytes.values()) == sum(found.layer_bytes.values()) == found.bytes


def test_every_other_format_is_there() -> None:
    """In every clone: what people bring."""
    schemes = {fmt.name for folder in TINY.glob("*/") for fmt in Checkpoint(folder).formats.values()}
    assert {"gptq", "nf4", "fp4", "llm-int8", "ct-packed", "ct-int8", "ct-float8"} <= schemes
    assert sum(file.stat().st_size for file in TINY.rglob("*") if file.is_file()) < 2_000_000
