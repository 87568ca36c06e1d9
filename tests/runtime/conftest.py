"""Tiny random models of every family, saved as real checkpoints, for tests that run an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from quantkit.arch import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 112,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large, so that the most probable tokens are no near ties
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What only some families know. Where both kinds of layers occur, both are there; windows are shorter than prompts.
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_UPPER_WINDOW = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 16},
    "qwen2": _UPPER_WINDOW,
    "qwen3": _UPPER_WINDOW | {"attention_bias": True},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 24},
    "gemma3_text": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"sliding_window": 16, "partial_rotary_factor": 0.5},
}


def save_model(family: str, folder: Path) -> Path:
    """A random model in float32. Norms and biases are random too: fresh ones are all alike and would hide mistakes."""
    config = transformers.AutoConfig.for_model(family, **SIZES | SETTINGS[family])
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[family].architecture)(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def family_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`family_model(name)`: the folder of a tiny model of that family, saved when it is first asked for."""
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            folders[family] = save_model(family, tmp_path_factory.mktemp("families") / family)
        return folders[family]

    return folder_of
