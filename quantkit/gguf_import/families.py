"""What config.json says of some families only, from GGUF metadata. Where llama.cpp has a number of a family in its code
and not in its files, it stands here too."""

from __future__ import annotations

from typing import Any

from quantkit import arch
from quantkit.arch import Family
from quantkit.errors import InputError, did_you_mean
from quantkit.gguf_import.reader import GgufFile

# GGUF's name of an architecture -> our family. Mistral files name themselves "llama", and without its sliding window
# Mistral is the same computation.
ARCHITECTURES = {
    "llama": arch.LLAMA,
    "qwen2": arch.QWEN2,
    "qwen3": arch.QWEN3,
    "gemma2": arch.GEMMA2,
    "gemma3": arch.GEMMA3_TEXT,
    "phi3": arch.PHI3,
    "qwen2moe": arch.QWEN2_MOE,
    "qwen3moe": arch.QWEN3_MOE,
}
_WITH_EXPERTS = {"llama": arch.MIXTRAL}  # of an architecture that has experts in some files only
_BY_WIDTH = {"gemma2": 46, "gemma3": 62}  # layers of the model whose scores are scaled by hidden size / heads
_GEMMA3_PATTERN, _LOCAL_BASE = 6, 10_000.0
_SLIDING, _FULL = "sliding_attention", "full_attention"


def family_of_file(file: GgufFile) -> Family:
    """The model family of a file, or a refusal that lists what is supported."""
    name = file.architecture
    if name not in ARCHITECTURES:
        raise InputError(
            f"{file.path} holds a '{name}' model, which is not supported; {did_you_mean(name, ARCHITECTURES)}"
        )
    family = _WITH_EXPERTS.get(name, ARCHITECTURES[name]) if _experts(file) else ARCHITECTURES[name]
    if bool(_experts(file)) != family.may_have_experts:
        said = "no experts" if family.may_have_experts else f"{_experts(file)} experts"
        raise InputError(f"{file.path}: a {name} model with {said} is not supported")
    return family


def family_keys(file: GgufFile, family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """The keys of config.json beside those that all families have, which `config` holds."""
    keys: dict[str, Any] = {"hidden_act": family.activation, **_bias_keys(file, family)}
    if family.may_have_experts:
        keys |= _expert_keys(file, family)
    if file.architecture in _BY_WIDTH:
        keys |= _gemma_keys(file, family, config)
    elif family is arch.PHI3:
        rotated = config["rope_parameters"].get("partial_rotary_factor", 1.0)
        keys |= {"sliding_window": _window(file), "partial_rotary_factor": rotated}
        if "original_max_position_embeddings" in config["rope_parameters"]:
            original = config["rope_parameters"]["original_max_position_embeddings"]
            keys["original_max_position_embeddings"] = original
    elif family.sliding != "none":  # files of these families hold no window
        keys |= {"use_sliding_window": False, "sliding_window": None}
        keys["max_window_layers"] = config["num_hidden_layers"]
    return keys


def _gemma_keys(file: GgufFile, family: Family, config: dict[str, Any]) -> dict[str, Any]:
    layers, hidden, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    name = file.architecture
    by_width = layers == _BY_WIDTH[name]
    keys: dict[str, Any] = {
        "hidden_activation": family.activation,
        "query_pre_attn_scalar": hidden // heads if by_width else config["head_dim"],
        "sliding_window": _window(file),
    }
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        keys[cap] = file.number(f"{name}.{cap}")
    every = family.full_every
    key = f"{name}.attention.sliding_window_pattern"
    if name == "gemma3" and key in file.fields and not file.is_list(key):
        every = file.need(key, int)
    full = [(layer + 1) % every == 0 for layer in range(layers)] if every > 0 else [True] * layers
    if file.is_list(key):
        full = [not slides for slides in file.need(key, list)]
        if len(full) != layers:
            raise InputError(f"{file.path}: '{key}' speaks of {len(full)} layers, but there are {layers}; get it again")
    if keys["sliding_window"] is None:
        full = [True] * layers
    keys["layer_types"] = [_FULL if whole else _SLIDING for whole in full]
    if family.rope == "per-layer-type":
        local = file.number(f"{name}.rope.freq_base_swa") or _LOCAL_BASE
        sliding = {"rope_type": "default", "rope_theta": local}
        keys |= {"rope_parameters": {_FULL: config["rope_parameters"], _SLIDING: sliding}, "rope_scaling": None}
        keys["rope_local_base_freq"] = local
    return keys


def _expert_keys(file: GgufFile, family: Family) -> dict[str, Any]:
    count = file.need(f"{file.architecture}.expert_count", int)
    used = file.need(f"{file.architecture}.expert_used_count", int)
    if not 0 < used <= count:
        raise InputError(f"{file.path}: {used} of {count} experts cannot be chosen for a token; get the file again")
    if family is arch.MIXTRAL:
        return {"num_local_experts": count, "num_experts_per_tok": used}
    keys: dict[str, Any] = {"num_experts": count, "num_experts_per_tok": used, "decoder_sparse_step": 1}
    keys |= {"mlp_only_layers": [], "norm_topk_prob": family is arch.QWEN3_MOE}
    keys["moe_intermediate_size"] = file.shape("blk.0.ffn_gate_exps.weight")[-2]
    if family is arch.QWEN2_MOE:
        keys["shared_expert_intermediate_size"] = file.shape("blk.0.ffn_gate_shexp.weight")[0]
        keys["qkv_bias"] = "blk.0.attn_q.bias" in file.tensors
    return keys


def _experts(file: GgufFile) -> int:
    return file.find(f"{file.architecture}.expert_count", int) or 0


def _window(file: GgufFile) -> int | None:
    return file.find(f"{file.architecture}.attention.sliding_window", int) or None


def _bias_keys(file: GgufFile, family: Family) -> dict[str, bool]:
    """Whether attention and MLP have biases, for the families whose config.json says so."""
    keys = {}
    if family.qkv_bias == "config":
        keys["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if family.mlp_bias == "config":
        keys["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return keys
