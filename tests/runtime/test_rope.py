"""Our rope tables against transformers' rotary modules, for every family and kind of scaling, old and new spelling."""

import sys
from typing import Any

import pytest
import torch
import transformers

from quantkit.arch import FAMILIES, GPT_OSS
from quantkit.errors import InputError
from quantkit.runtime.model.config import read_model_config
from quantkit.runtime.model.rope import rope_tables

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "qk_rope_head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT, LONG = [1.0 + i / 10 for i in range(8)], [2.0 + i for i in range(8)]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    "theta": ("qwen2", {"rope_theta": 1e6}),
    "new spelling": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama3": ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}}),
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "yarn": (
        "qwen3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "latent yarn": (
        "deepseek_v3",
        {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 1.0,
                          "original_max_position_embeddings": 32}},
    ),
    "gemma3 old spelling": ("gemma3_text", {"rope_theta": 2e6, "rope_local_base_freq": 2e4,
                                            "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "longrope": ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
                          "original_max_position_embeddings": 64}),
}  # fmt: skip


def transformers_tables(raw: dict[str, Any], kind: str | None, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    family = FAMILIES[raw["model_type"]]
    model = getattr(transformers, family.architecture)
    rotary = getattr(sys.modules[model.__module__], family.architecture.removesuffix("ForCausalLM") + "RotaryEmbedding")
    built = rotary(transformers.AutoConfig.for_model(**raw))
    extra = () if kind is None else (kind,)
    found = built(torch.zeros(1), torch.arange(positions)[None], *extra)
    if not isinstance(found, tuple):  # as complex numbers
        return found[0].real, found[0].imag
    cos, sin = found
    half = cos.shape[-1] // (1 if family is GPT_OSS else 2)  # which keeps no second copy for the other half of a head
    return cos[0, :, :half], sin[0, :, :half]


@pytest.mark.parametrize("name", CASES)
def test_tables(name: str) -> None:
    model_type, changes = CASES[name]
    raw = {"model_type": model_type} | SIZES | changes
    config = read_model_config(raw)
    tables = rope_tables(raw, config, 200, torch.device("cpu"))
    for layer, table in enumerate(tables):
        by_type = config.family.rope == "per-layer-type"
        kind = ("full_attention" if config.windows[layer] is None else "sliding_attention") if by_type else None
        cos, sin = transformers_tables(raw, kind, 200)
        torch.testing.assert_close(table.cos, cos, rtol=0, atol=2e-6)
        torch.testing.assert_close(table.sin, sin, rtol=0, atol=2e-6)


def test_unknown_kind() -> None:
    raw = {"model_type": "llama"} | SIZES | {"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}
    with pytest.raises(InputError, match="'yarm' is not supported; did you mean 'yarn'"):
        rope_tables(raw, read_model_config(raw), 8, torch.device("cpu"))
    raw["rope_scaling"] = {"rope_type": "linear"}
    with pytest.raises(InputError, match="incomplete: 'factor'"):
        rope_tables(raw, read_model_config(raw), 8, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"factor": None}, "incomplete"), ({"low_freq_factor": 4.0}, "low_freq_factor 4.0 must be below its .* 4.0")],
)
def test_wrong_llama3_settings(changes: dict[str, Any], message: str) -> None:
    raw = {"model_type": "llama"} | SIZES | {"rope_scaling": LLAMA3 | changes}
    with pytest.raises(InputError, match=message):
        rope_tables(raw, read_model_config(raw), 8, torch.device("cpu"))


def test_llama3_frequencies_over_a_long_context() -> None:
    """Llama-3.1-8B's own settings: after 131,071 positions a frequency that is off by 1e-6 would turn by 0.1."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    scaling = LLAMA3 | {"original_max_position_embeddings": 8192}
    raw = {"model_type": "llama"} | SIZES | sizes | {"rope_theta": 5e5, "rope_scaling": scaling}
    raw |= {"max_position_embeddings": 131072, "num_hidden_layers": 1}
    ours = rope_tables(raw, read_model_config(raw), 131072, torch.device("cpu"))[0]
    cos, sin = transformers_tables(raw, None, 131072)
    torch.testing.assert_close(ours.cos, cos, rtol=0, atol=1e-3)
    torch.testing.assert_close(ours.sin, sin, rtol=0, atol=1e-3)
