"""The scripts of eval/peers whose packages are here, on the tiny model: quantkit reads what they write."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoint import Checkpoint

pytestmark = pytest.mark.interop
BASE = Path(__file__).parents[1] / "golden" / "base"


@pytest.mark.parametrize(
    ("script", "method", "bits", "scheme"),
    [
        ("by_bitsandbytes", "nf4", 4, "nf4"),
        ("by_bitsandbytes", "llm-int8", 8, "int8"),
        ("by_gptqmodel", "gptq", 4, "gptq"),
        ("by_gptqmodel", "gptq", 3, "gptq"),
    ],
)
def test_what_a_tool_writes_is_read(script: str, method: str, bits: int, scheme: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 128, (32, 64), generator=generator, dtype=torch.int32)
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    words = ("-m", "quantkit.eval.peers.tools.watched", tmp_path / "peaks", f"quantkit.eval.peers.tools.{script}")
    words += (BASE, tmp_path / "tokens.safetensors", tmp_path / "out", "--method", method, "--bits", bits)
    done = subprocess.run(
        [sys.executable, *(str(word) for word in (*words, "--group", 32))], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    formats = Checkpoint(tmp_path / "out").formats
    assert len(formats) == 14
    assert all(scheme in repr(fmt).lower() for fmt in formats.values())
    assert json.loads((tmp_path / "peaks").read_text())["host"] > 0
