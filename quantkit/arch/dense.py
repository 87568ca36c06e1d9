"""Families whose layers are an attention and an MLP."""

from __future__ import annotations

from quantkit.arch.family import Family
from quantkit.stages import Part, dense_stages

_GEMMA = dense_stages(
    Part("attention", "self_attn", "input_layernorm", "post_attention_layernorm"),
    Part("mlp", "mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)

LLAMA = Family("llama", "LlamaForCausalLM", qkv_bias="config", mlp_bias="config")

MISTRAL = Family("mistral", "MistralForCausalLM", sliding="all", sliding_window=4096)

QWEN2 = Family("qwen2", "Qwen2ForCausalLM", qkv_bias="always", sliding="upper", sliding_window=4096)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    qk_norm=True,
    qkv_bias="config",
    head_dim=128,
    sliding="upper",
    sliding_window=4096,
)

GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    layout=_GEMMA,
    norm_offset=1.0,
    qkv_bias="config",
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    sliding="alternating",
    full_every=2,
    sliding_window=4096,
    head_dim=256,
    query_pre_attn_scalar=256,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    scaled_embedding=True,
    tie_word_embeddings=True,
)

GEMMA3_TEXT = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    layout=_GEMMA,
    norm_offset=1.0,
    qk_norm=True,
    qkv_bias="config",
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    rope="per-layer-type",
    sliding="alternating",
    full_every=6,
    sliding_window=4096,
    head_dim=256,
    query_pre_attn_scalar=256,
    scaled_embedding=True,
    tie_word_embeddings=True,
)

PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    layout=dense_stages(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    norm_eps=1e-5,
    rope="partial",
    longrope_aliases=("su", "yarn"),
    sliding="all",
)
