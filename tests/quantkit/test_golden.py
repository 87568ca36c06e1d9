"""Checkpoints that other tools wrote, read by us. They lie beside the repository and are not part of it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantkit import load_reference
from quantkit.inspection import inspect_checkpoint

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
TOLERANCE = {"bitsandbytes-int8": 2.5e-2, "llmcompressor-W8A8": 2.5e-2, "llmcompressor-FP8": 6e-2}
FOLDERS = (
    *("base-bf16", "gptqmodel-gptq-sym", "gptqmodel-gptq-asym", "gptqmodel-awq", "bitsandbytes-nf4-dq"),
    *("bitsandbytes-int8", "llmcompressor-W4A16", "llmcompressor-W8A8", "llmcompressor-FP8"),
)

pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="../shared/golden is not here")


@pytest.mark.parametrize("name", FOLDERS)
def test_logits(name: str) -> None:
    expected = load_file(GOLDEN / name / "expected.safetensors")
    with torch.no_grad():
        logits = load_reference(GOLDEN / name, dtype="float32")(expected["input_ids"]).logits
    error = (logits - expected["logits"]).norm() / expected["logits"].norm()
    assert float(error) < TOLERANCE.get(name, 1e-2)


@pytest.mark.parametrize("name", FOLDERS)
def test_inspect(name: str) -> None:
    found = inspect_checkpoint(GOLDEN / name)
    assert found.parameters == 1_705_216 or found.quantized_weights == 0
    assert sum(found.part_bytes.values()) == sum(found.layer_bytes.values()) == found.bytes
