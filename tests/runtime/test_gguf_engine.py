"""GGUF files run as they are: logits are those of the same numbers, decoded, in a folder with the model's own config.

Weights are multiplied in their blocks, embeddings looked up in theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gguf_files import gguf_pair
from long_cases import others_long
from quantkit.formats.gguf import TYPES
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.startup import start_engine

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.05}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    "phi3": {"sliding_window": 16, "partial_rotary_factor": 0.5},
    "mixtral": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
}
PROMPT = [number * 37 % 300 + 3 for number in range(40)]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)


def logits_of(model: Path, dtype: str = "float32", device: str = "cpu") -> Tensor:
    """Of a prompt that is longer than windows, and of two tokens after it."""
    engine = start_engine(model, EngineOptions(device=device, dtype=dtype))
    rows: list[Tensor] = []
    compute = engine.runner.decoder.logits

    def watched(hidden: Tensor) -> Tensor:
        rows.append(compute(hidden).float())
        return rows[-1].to(hidden.dtype)

    engine.runner.decoder.logits = watched  # type: ignore[method-assign]
    engine.add(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0))
    while engine.unfinished:
        engine.step()
    return torch.cat(rows)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_what_its_own_config_says(family: str, tmp_path: Path) -> None:
    file, folder = gguf_pair(family, tmp_path, **FAMILIES[family])
    assert relative_error(logits_of(file), logits_of(folder)) < 1e-4


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.25, 1.5, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
    "original_max_position_embeddings": 32,
    "attention_factor": 1.25,
}
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32}),
        ("gemma3_text", {"rope_parameters": BY_LAYER, "sliding_window": 16, "query_pre_attn_scalar": 16}),
    ],
)
def test_ropes_for_longer_contexts(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 6} if family == "gemma3_text" else {}
    file, folder = gguf_pair(family, tmp_path, **settings, **layers)
    assert relative_error(logits_of(file), logits_of(folder)) < 1e-4


@pytest.mark.parametrize("kind", others_long(list(TYPES), ("Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS")))
def test_every_type_of_blocks(kind: str, tmp_path: Path) -> None:
    file, folder = gguf_pair("llama", tmp_path, kind, **WIDE, tie_word_embeddings=kind in ("Q4_K", "Q8_0"))
    wanted = logits_of(folder)
    assert relative_error(logits_of(file), wanted) < 1e-4
    halves = logits_of(file, "bfloat16")[: len(PROMPT)]  # a token after it may be another one
    assert relative_error(halves, wanted[: len(PROMPT)]) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "kind"), [("llama", kind) for kind in TYPES] + [("qwen3_moe", "Q4_K"), ("gemma2", "Q6_K")]
)
def test_on_a_gpu(family: str, kind: str, tmp_path: Path) -> None:
    """Against the same numbers, decoded, in float32 on a CPU."""
    settings = FAMILIES[family] | WIDE
    if "query_pre_attn_scalar" in settings:  # a file does not say: it is the heads' size
        settings["query_pre_attn_scalar"] = WIDE["head_dim"]
    file, folder = gguf_pair(family, tmp_path, kind, **settings)
    wanted = logits_of(folder)[: len(PROMPT)]
    found = logits_of(file, "bfloat16", "cuda")[: len(PROMPT)].cpu()
    assert relative_error(found, wanted) < 0.03


@pytest.mark.parametrize("kind", ["TQ2_0", "MXFP4"])
def test_types_without_a_kernel_are_decoded_and_said(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, folder = gguf_pair("llama", tmp_path, kind, **WIDE)
    assert relative_error(logits_of(file), logits_of(folder)) < 1e-2  # decoded to 16 bits
    said = [record.getMessage() for record in caplog.records if "without a kernel" in record.getMessage()]
    assert said == [f"tiny.{kind}.gguf: tensors of types without a kernel are decoded to 16 bits: 16 of {kind}"]
