"""config.json as metadata of a GGUF file: the keys that llama.cpp reads, by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.arch import FAMILIES, Config, Family
from quantkit.errors import InputError, did_you_mean
from quantkit.gguf_export.rope import rope_keys

# Our family -> the name of the architecture in llama.cpp. Mistral without its window is the same computation as Llama.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
# How llama.cpp's Gemma models alternate: every n-th layer sees all tokens, unless the file has a list.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}
_SHARED_WIDTH = ("qwen2", "phi3")  # heads x head size must be the hidden size there
_LARGEST_GEMMA = (46, 62)  # layers of the two Gemma models whose scores are scaled by hidden size / heads


def exportable_family(config: Config) -> Family:
    """The family of a model, or a refusal that lists what a GGUF file can be written of."""
    name = str(config.get("model_type"))
    if name not in ARCHITECTURES:
        raise InputError(f"a '{name}' model cannot be written as GGUF; {did_you_mean(name, ARCHITECTURES)}")
    return FAMILIES[name]


def filled_config(config: Config) -> dict[str, Any]:
    """config.json with the defaults of transformers where it is silent, and rope in one form: `rope_parameters`."""
    from transformers import AutoConfig

    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    filled: dict[str, Any] = AutoConfig.for_model(**plain).to_dict()
    return filled


def model_keys(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the architecture; `config` is filled. Refuses what llama.cpp would compute otherwise."""
    _check(family, config)
    heads = config["num_attention_heads"]
    head = family.size_of_head(config)
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "vocab_size": config["vocab_size"],
        **rope_keys(family, config, head),
        **_window_keys(family, config),
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(family, name) is not None and config.get(name):
            keys[name] = float(config[name])
    return {f"{ARCHITECTURES[family.model_type]}.{key}": value for key, value in keys.items()}


def window_note(family: Family, config: Mapping[str, Any]) -> str | None:
    """What a user must know where llama.cpp does not have the model's window."""
    if family.model_type in _FULL_EVERY:
        return None
    windows = {family.window(config, layer) for layer in range(config["num_hidden_layers"])} - {None}
    shortest = min((width for width in windows if width), default=None)
    if shortest is None or shortest >= config["max_position_embeddings"]:
        return None
    return f"llama.cpp knows no window for this family: beyond {shortest} tokens it computes something else"


def _window_keys(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    if family.model_type == "phi3":
        return {"attention.sliding_window": config.get("sliding_window") or 0}
    every = _FULL_EVERY.get(family.model_type)
    if every is None:
        return {}
    slides = [family.window(config, layer) is not None for layer in range(config["num_hidden_layers"])]
    keys: dict[str, Any] = {"attention.sliding_window": config["sliding_window"]}
    if slides != [bool((layer + 1) % every) for layer in range(len(slides))]:
        keys["attention.sliding_window_pattern"] = slides
    return keys


def _check(family: Family, config: Mapping[str, Any]) -> None:
    name, head, heads = family.model_type, family.size_of_head(config), config["num_attention_heads"]
    activation = config.get(family.activation_key, family.activation)
    if activation != family.activation:
        raise InputError(f"llama.cpp runs {name} with {family.activation}, but this model has {activation}")
    if name in _SHARED_WIDTH and head * heads != config["hidden_size"]:
        raise InputError(
            f"llama.cpp needs heads x head size = hidden size for {name}, "
            f"but this model has {heads} x {head} and {config['hidden_size']}"
        )
    scalar = config.get("query_pre_attn_scalar")
    if family.query_pre_attn_scalar is not None and scalar is not None:
        largest = config["num_hidden_layers"] in _LARGEST_GEMMA
        expected = config["hidden_size"] // heads if largest else head
        if scalar != expected:
            raise InputError(f"llama.cpp scales scores of {name} by {expected} ** -0.5, but this model by {scalar}")
