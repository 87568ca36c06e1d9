"""Which GGUF tensor becomes which weight, and how: names, rows put back in order, numbers decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from quantkit.arch import LLAMA, Family
from quantkit.checkpoint import require_finite
from quantkit.errors import InputError
from quantkit.gguf_import.reader import GgufFile
from quantkit.gguf_import.rope import ROPE_FREQS

_LINEARS = {  # name in a GGUF block -> name in a transformers block
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Placement:
    """One tensor's way from the file to the folder."""

    source: str  # name in the GGUF file
    target: str  # name in the folder
    shape: tuple[int, ...]
    permuted_heads: int = 0  # the rows lie in ggml's rotary order within this many heads; 0: in their own order


def placements(file: GgufFile, family: Family, config: dict[str, Any]) -> list[Placement]:
    """Every tensor of the model, in the order of the layers. Raises if the file holds other tensors than these."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    places = [Placement("token_embd.weight", "model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(config["num_hidden_layers"]):
        places += _block(layer, family, config)
    places.append(Placement("output_norm.weight", "model.norm.weight", (hidden,)))
    if not config["tie_word_embeddings"]:
        places.append(Placement("output.weight", "lm_head.weight", (vocab, hidden)))
    _check(file, places)
    return places


def read_weight(file: GgufFile, place: Placement, dtype: torch.dtype) -> Tensor:
    """One decoded weight, ready to be written."""
    tensor = file.tensors[place.source]
    with np.errstate(all="ignore"):  # damaged scales are reported below, by name
        values = dequantize(tensor.data, tensor.tensor_type).reshape(place.shape)
    weight = torch.from_numpy(values if values.flags.writeable else values.copy())
    require_finite(place.source, weight)
    weight = weight.to(dtype)
    if dtype == torch.float16 and not bool(torch.isfinite(weight).all()):
        raise InputError(f"tensor {place.source} is too large for float16; choose --dtype bfloat16 or float32")
    return own_row_order(weight, place.permuted_heads) if place.permuted_heads else weight


def own_row_order(weight: Tensor, heads: int) -> Tensor:
    """Undoes ggml's rotary order, in which the two halves of each head of llama's q and k alternate row by row."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])  # [heads, dim / 2, 2, in]
    return pairs.transpose(1, 2).reshape(weight.shape)


def tensor_types(file: GgufFile) -> dict[str, int]:
    """How many tensors of each ggml type a file holds, most frequent first."""
    names = [tensor.tensor_type.name for tensor in file.tensors.values()]
    return {name: names.count(name) for name in sorted(set(names), key=lambda name: (-names.count(name), name))}


def _block(layer: int, family: Family, config: dict[str, Any]) -> list[Placement]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    outputs = _outputs(config)
    biased = family.biased(layer, config)
    source, target = f"blk.{layer}", f"model.layers.{layer}"
    places = [
        Placement(f"{source}.attn_norm.weight", f"{target}.input_layernorm.weight", (hidden,)),
        Placement(f"{source}.ffn_norm.weight", f"{target}.post_attention_layernorm.weight", (hidden,)),
    ]
    for short, name in _LINEARS.items():
        rows, columns = outputs[short]
        # Only llama files have rows in ggml's rotary order.
        heads = rows // head_dim if family is LLAMA and short in ("attn_q", "attn_k") else 0
        places.append(Placement(f"{source}.{short}.weight", f"{target}.{name}.weight", (rows, columns), heads))
        if name in biased:
            places.append(Placement(f"{source}.{short}.bias", f"{target}.{name}.bias", (rows,), heads))
    if family.qk_norm:
        for part in ("q", "k"):
            norm = Placement(f"{source}.attn_{part}_norm.weight", f"{target}.self_attn.{part}_norm.weight", (head_dim,))
            places.append(norm)
    return places


def _outputs(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(rows, columns) of every linear of a block."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }


def _check(file: GgufFile, places: Sequence[Placement]) -> None:
    """Nothing missing, nothing left over, every shape as expected, every type decodable."""
    missing = [place.source for place in places if place.source not in file.tensors]
    if missing:
        raise InputError(
            f"{file.path} lacks {len(missing)} of {len(places)} tensors, the first is {missing[0]}; "
            "the file is incomplete, get it again"
        )
    surplus = set(file.tensors) - {place.source for place in places} - {ROPE_FREQS}
    if surplus:
        raise InputError(
            f"{file.path}: tensor {min(surplus)} has no place in a {file.architecture} model; not supported"
        )
    known = {kind for kind in {tensor.tensor_type for tensor in file.tensors.values()} if decodable(kind)}
    for place in places:
        if file.shape(place.source) != place.shape:
            raise InputError(
                f"{file.path}: tensor {place.source} has shape {list(file.shape(place.source))}, "
                f"but the metadata asks for {list(place.shape)}; get the file again"
            )
        kind = file.tensors[place.source].tensor_type
        if kind not in known:
            raise InputError(
                f"tensor {place.source} has type {kind.name}, which cannot be decoded; "
                "take a file in a common type such as Q8_0, Q4_K_M or F16"
            )


def decodable(kind: Any) -> bool:
    """Whether the gguf package can decode a type: asked of the package, with one block of zeros."""
    block_bytes = GGML_QUANT_SIZES[kind][1]
    try:
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True
