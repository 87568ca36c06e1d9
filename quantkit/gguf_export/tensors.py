"""Which tensor of a model becomes which tensor of a GGUF file: the way of `gguf_import/placement.py`, backwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quantkit.arch import LLAMA, MISTRAL, Family
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.gguf_import.placement import Placement, placements_of

_OUTSIDE_ATTENTION = ("attn_output.bias", "ffn_")  # biases that llama.cpp reads for llama alone


def tensor_places(source: Checkpoint, family: Family, config: Mapping[str, Any]) -> list[Placement]:
    """Every tensor of the file with its source in the folder, where a quantized layer stands as its weight. Refuses a
    folder that has others."""
    sizes = {"head_dim": family.size_of_head(config), "tie_word_embeddings": family.tied(config)}
    as_file = LLAMA if family is MISTRAL else family
    places = placements_of(as_file, {**config, **sizes})
    found = set(source.plain_names()) | {f"{module}.weight" for module in source.formats}
    tied = {"lm_head.weight"} if family.tied(config) else set()
    surplus = found - {place.target for place in places} - tied
    surplus = {name for name in surplus if not family.is_beyond(name, config)}
    if as_file is not LLAMA:
        surplus |= {place.target for place in places if _unread_bias(place.source)}
    if surplus:
        raise InputError(f"tensor {min(surplus)} has no place in a GGUF file of a {family.model_type} model")
    missing = {place.target for place in places} - found
    if missing:
        raise InputError(f"{source.folder} has no tensor {min(missing)}; the checkpoint is incomplete")
    return places


def arranged(tensor: Tensor, place: Placement) -> Tensor:
    """A tensor of the folder, or the packed rows of it, as the file has it."""
    moved = rotary_row_order(tensor, place.permuted_heads) if place.permuted_heads else tensor
    return moved.float() + place.minus if place.minus else moved


def rotary_row_order(weight: Tensor, heads: int) -> Tensor:
    """The rows of llama's q and k as ggml wants them: the two halves of each head alternate."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])  # [heads, 2, dim / 2, in]
    return halves.transpose(1, 2).reshape(weight.shape)


def _unread_bias(name: str) -> bool:
    return name.endswith(".bias") and any(part in name for part in _OUTSIDE_ATTENTION)
