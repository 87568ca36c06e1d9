"""The one builder of tiny random models for tests.

`save_model(family, folder)` saves a checkpoint of any family in `quantkit.arch.FAMILIES` and returns the transformers
model: two layers of hidden size 64 in float32, grouped-query attention, vocabulary 112. Keywords change or add fields
of its configuration (`num_hidden_layers=7`, `sliding_window=8`, `initializer_range=0.02`); `dtype="bfloat16"` saves in
another type; `build_model` does not save. Weights depend on nothing but the arguments. Norms and biases are random too:
fresh ones are all alike and would hide mistakes. Where a test changes nothing, use the fixture `family_model(name)`,
which saves each family once per process, with what only some families have (`SETTINGS`).
"""

from pathlib import Path
from typing import Any

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
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
_UPPER_WINDOW = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}
# What only some families know. Where both kinds of layers occur, both are there; windows are shorter than prompts.
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
    "mixtral": {"sliding_window": 16, "num_local_experts": 4},
    "qwen2_moe": _UPPER_WINDOW
    | {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {
        "sliding_window": 16,
        "use_sliding_window": True,
        "attention_bias": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v2": {
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        "attention_bias": True,
        "rope_parameters": _YARN,
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
    },
    "gpt_oss": {
        "sliding_window": 16,
        "num_local_experts": 4,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
}

WITH_LATENTS = ("deepseek_v2", "deepseek_v3")
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", *WITH_LATENTS)
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
_COUNTS = {
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
}
FEW_EXPERTS: dict[str, dict[str, Any]] = {
    name: FEW | {_COUNTS.get(name, "n_routed_experts"): 4} for name in WITH_EXPERTS
}
SMALL_LATENTS = {
    "num_key_value_heads": 4,  # transformers repeats keys and values where there are fewer
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
}
for _name in WITH_LATENTS:
    FEW_EXPERTS[_name] |= SMALL_LATENTS


def build_model(family: str, dtype: str = "float32", **changes: Any) -> Any:
    """A random model with eager attention: some versions of transformers leave out soft caps in their faster kinds."""
    known = FAMILIES[family]
    sizes = SIZES | FEW_EXPERTS.get(family, {}) | changes
    config = transformers.AutoConfig.for_model(known.model_type, attn_implementation="eager", **sizes)
    torch.manual_seed(0)
    model = getattr(transformers, known.architecture)(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5 - known.norm_offset, 1.5 - known.norm_offset)
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.1)
    return model.to(getattr(torch, dtype))


def save_model(family: str, folder: Path, dtype: str = "float32", **changes: Any) -> Any:
    """Saves what `build_model` builds, and returns it."""
    model = build_model(family, dtype, **changes)
    model.save_pretrained(folder)
    return model
