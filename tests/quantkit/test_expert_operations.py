"""Quantizing a model of many small experts is bound by its host on a GPU: how much every expert asks of it."""

from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

import quantkit
from operations import counted
from quantkit import working_memory
from quantkit.calibration import Calibration
from quantkit.reference import load_tokenizer
from quantkit.sources import model_folder
from tiny_models import save_model

Tensors = dict[str, Tensor]
RUN = {"calibration": Calibration(samples=4, seq_len=32), "quality_windows": 0, "device": "cpu"}


def quantized(folder: Path, experts: int) -> tuple[Counter[str], Counter[str], Tensors]:
    """A whole run, from reading a model to verifying what was written."""
    save_model("qwen3_moe", folder / "model", num_hidden_layers=1, num_experts=experts, vocab_size=4096)
    load_tokenizer(model_folder("demo-draft")).save_pretrained(folder / "model")
    with counted() as count:
        quantkit.quantize(folder / "model", "gptq-w4g32", folder / "out", **RUN)  # type: ignore[arg-type]
    return count.operations, count.waits, load_file(folder / "out" / "model.safetensors")


def test_an_expert_more_asks_little_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And experts that are rounded together become what they become alone."""
    (few, waits, found), (many, more_waits, _) = (quantized(tmp_path / str(experts), experts) for experts in (6, 12))
    for more, fewer in ((many, few), (more_waits, waits)):
        more.subtract(fewer)
    assert many.total() / 6 < 480, many.most_common(12)
    assert more_waits.total() / 6 < 75, more_waits
    monkeypatch.setattr(working_memory, "_CPU_BYTES", 1)
    alone, _, expected = quantized(tmp_path / "alone", 6)
    assert alone.total() > 2 * few.total()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        same = float((tensor == expected[name]).float().mean())
        assert same > 0.999, name  # sums in another order may break a tie
