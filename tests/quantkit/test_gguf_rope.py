"""Rotary settings read from GGUF files: the frequencies must be those that transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantkit.errors import InputError
from quantkit.gguf_import.reader import GgufFile, open_gguf
from quantkit.gguf_import.rope import ROPE_FREQS, rope_parameters

THETA = 500000.0


def frequencies(rope: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope)
    if rope["rope_type"] == "default":
        return 1.0 / THETA ** (torch.arange(0, head_dim, 2) / head_dim), 1.0
    inverse, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return inverse, scale


def written(path: Path, table: np.ndarray[Any, Any] | None = None, **metadata: Any) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_rope_freq_base(THETA)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"llama.rope.{key.replace('__', '.')}", value)
    writer.add_tensor(ROPE_FREQS if table is not None else "x", np.ones(4, np.float32) if table is None else table)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("factor", "high", "original"),
    [(8.0, 4.0, 8192), (32.0, 4.0, 8192), (16.0, 6.0, 4096)],
    ids=["3.1", "3.2", "other"],
)
def test_llama3_table_gives_back_the_scaling(
    tmp_path: Path, head_dim: int, factor: float, high: float, original: int
) -> None:
    said = {"rope_type": "llama3", "rope_theta": THETA, "factor": factor, "low_freq_factor": 1.0}
    said |= {"high_freq_factor": high, "original_max_position_embeddings": original}
    wanted, _ = frequencies(said, head_dim)
    plain, _ = frequencies({"rope_type": "default", "rope_theta": THETA}, head_dim)
    found = rope_parameters(written(tmp_path / "f.gguf", (plain / wanted).float().numpy()), head_dim)
    torch.testing.assert_close(frequencies(found, head_dim)[0], wanted, rtol=1e-3, atol=0)
    assert found["factor"] == factor
    assert found["high_freq_factor"] == pytest.approx(high, rel=1e-3)


def test_table_of_ones_means_no_scaling(tmp_path: Path) -> None:
    found = rope_parameters(written(tmp_path / "f.gguf", np.ones(32, np.float32)), 64)
    assert found == {"rope_type": "default", "rope_theta": THETA}


@pytest.mark.parametrize("table", [np.linspace(1, 8, 32), np.ones(5), np.zeros(32)], ids=["shape", "length", "zeros"])
def test_table_without_meaning_is_refused(tmp_path: Path, table: np.ndarray[Any, Any]) -> None:
    with pytest.raises(InputError, match=ROPE_FREQS):
        rope_parameters(written(tmp_path / "f.gguf", table.astype(np.float32)), 64)


def test_linear_and_yarn(tmp_path: Path) -> None:
    linear = rope_parameters(written(tmp_path / "f.gguf", scaling__type="linear", scaling__factor=4.0), 64)
    assert linear == {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
    settings: dict[str, Any] = {
        "scaling__type": "yarn",
        "scaling__factor": 4.0,
        "scaling__original_context_length": 32768,
    }
    yarn = rope_parameters(written(tmp_path / "f.gguf", **settings), 64)
    wanted = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 32768}
    assert yarn == wanted
    scaled = rope_parameters(written(tmp_path / "f.gguf", **settings, scaling__attn_factor=1.0), 64)
    assert frequencies(scaled, 64)[1] == pytest.approx(frequencies(yarn, 64)[1])


@pytest.mark.parametrize(
    ("metadata", "word"),
    [({"dimension_count": 32}, "whole heads"), ({"scaling__type": "longrope", "scaling__factor": 4.0}, "longrope")],
)
def test_what_the_models_cannot_compute_is_refused(tmp_path: Path, metadata: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        rope_parameters(written(tmp_path / "f.gguf", **metadata), 64)
