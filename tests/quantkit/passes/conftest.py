"""Small models of every family, saved in float32 and with nothing in them that hides a mistake."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from quantkit.arch import Family

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "sliding_window": 8,
    "pad_token_id": 0,
    "initializer_range": 0.15,  # enough that logits depend on every layer
}


def _save(family: Family, folder: Path, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(family.model_type, attn_implementation="eager", **(SIZES | changes))
    torch.manual_seed(0)
    model = getattr(transformers, family.architecture)(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # fresh norms are all alike
            nn.init.uniform_(parameter, 0.3 - family.norm_offset, 1.7 - family.norm_offset)
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.fixture
def save_model() -> Callable[..., Any]:
    """`save_model(family, folder, **changes)`: saves a model with grouped-query attention and returns it."""
    return _save
