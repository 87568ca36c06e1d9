"""From GGUF metadata to config.json and generation_config.json."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from quantkit.errors import InputError
from quantkit.gguf_import.families import family_keys, family_of_file
from quantkit.gguf_import.reader import GgufFile
from quantkit.gguf_import.rope import rope_parameters

_NO_TOKEN = 0xFFFFFFFF  # -1 as the unsigned number it is stored in


def model_config(file: GgufFile, dtype: str) -> dict[str, Any]:
    """The contents of config.json. Sizes that a tensor shows are taken from the tensor."""
    family = family_of_file(file)
    vocab_size, hidden_size = _matrix(file, "token_embd.weight")
    heads = _count(file, "attention.head_count")
    kv_heads = _count(file, "attention.head_count_kv", heads)
    head_dim = _head_dim(file, heads, kv_heads)
    layers = _layers(file)
    rope = rope_parameters(file, head_dim)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": _count(file, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _count(file, "context_length"),
        "rms_norm_eps": file.need_number(f"{file.architecture}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_rope_keys(rope),
        **special_ids(file, vocab_size),
        "use_cache": True,
        "transformers_version": version("transformers"),
    }
    return config | family_keys(file, family, config)


def generation_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """The contents of generation_config.json: which tokens begin and end a text."""
    ends = [config.get("eos_token_id")]
    for name in ("eot", "eom"):  # end of turn, end of message: Llama 3 stops at either
        ends.append(_token_id(file, f"tokenizer.ggml.{name}_token_id", config["vocab_size"]))
    stops = list(dict.fromkeys(token for token in ends if token is not None))
    ids: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config}
    if stops:
        ids["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    return {**ids, "transformers_version": config["transformers_version"]}


def special_ids(file: GgufFile, vocab_size: int) -> dict[str, int]:
    """The ids of the tokens with a role, under the names transformers has for them."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {key: _token_id(file, f"tokenizer.ggml.{name}_token_id", vocab_size) for key, name in names.items()}
    return {key: token for key, token in ids.items() if token is not None}


def _token_id(file: GgufFile, key: str, vocab_size: int) -> int | None:
    token = file.find(key, int)
    if token is None or token in (-1, _NO_TOKEN):
        return None
    if not 0 <= token < vocab_size:
        raise InputError(f"{file.path}: '{key}' is {token}, but the model has {vocab_size} tokens; get the file again")
    return token


def _count(file: GgufFile, name: str, default: int | None = None) -> int:
    """A positive number from the architecture's own metadata; a list of equal numbers, one per layer, counts as one."""
    key = f"{file.architecture}.{name}"
    if default is not None and key not in file.fields:
        return default
    values = file.need(key, list) if file.is_list(key) else [file.need(key, int)]
    if not values or len(set(values)) > 1 or not isinstance(values[0], int) or values[0] < 1:
        raise InputError(f"{file.path}: '{key}' must be one positive number for all layers, not {values}")
    return values[0]


def _layers(file: GgufFile) -> int:
    """As many as there are tensors for: whatever the number says, it costs nothing."""
    layers = _count(file, "block_count")
    found = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if layers != found:
        key = f"{file.architecture}.block_count"
        raise InputError(f"{file.path}: '{key}' is {layers}, but there are tensors of {found} layers; get it again")
    return layers


def _matrix(file: GgufFile, name: str) -> tuple[int, int]:
    shape = file.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{file.path}: tensor {name} must be a matrix, but its shape is {list(shape)}")
    return shape[0], shape[1]


def _head_dim(file: GgufFile, heads: int, kv_heads: int) -> int:
    """The size of a head as the query matrix shows it, or a fused one; rotation takes its dimensions in pairs."""
    fused = "blk.0.attn_qkv.weight" in file.tensors
    rows, sharing = (_matrix(file, f"blk.0.attn_{'qkv' if fused else 'q'}.weight")[0], heads + 2 * kv_heads * fused)
    if rows % (2 * sharing) or heads % kv_heads:
        raise InputError(
            f"{file.path}: {rows} {'query, key and value' if fused else 'query'} rows, {heads} heads and {kv_heads} "
            "key-value heads do not fit together; get the file again"
        )
    return rows // sharing


def _rope_keys(rope: dict[str, Any]) -> dict[str, Any]:
    """The settings in the form of transformers 5 and in the older one that other engines still read."""
    keys: dict[str, Any] = {"rope_theta": rope["rope_theta"], "rope_parameters": rope}
    if rope["rope_type"] != "default":
        keys["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return keys
