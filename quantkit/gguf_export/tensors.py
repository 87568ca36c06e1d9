"""Which tensor of a model becomes which tensor of a GGUF file: names, the order of rows, Gemma's norms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.arch import Family
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.gguf_export.metadata import ARCHITECTURES

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_BIASES = {  # that llama.cpp reads, by architecture
    "llama": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    "qwen2": ("attn_q", "attn_k", "attn_v"),
    "qwen3": ("attn_q", "attn_k", "attn_v"),
    "gemma2": ("attn_q", "attn_k", "attn_v"),
    "gemma3": ("attn_q", "attn_k", "attn_v"),
    "phi3": (),
}


@dataclass(frozen=True)
class TensorPlace:
    """One tensor's way from the folder to the file."""

    target: str  # name in the file
    source: str  # name in the folder
    shape: tuple[int, ...]
    heads: int = 0  # rows of so many heads are put into ggml's rotary order; 0: they stay
    offset: float = 0.0  # added to every number

    def arranged(self, tensor: Tensor) -> Tensor:
        """The tensor, or the packed rows of it, as the file has it."""
        moved = rotary_row_order(tensor, self.heads) if self.heads else tensor
        return moved.float() + self.offset if self.offset else moved


def rotary_row_order(weight: Tensor, heads: int) -> Tensor:
    """The rows of llama's q and k as ggml wants them: the two halves of each head alternate."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])  # [heads, 2, dim / 2, in]
    return halves.transpose(1, 2).reshape(weight.shape)


def tensor_places(source: Checkpoint, family: Family, config: Mapping[str, Any]) -> list[TensorPlace]:
    """Every tensor of the folder, embeddings first. Refuses one that the architecture has no place for.

    A quantized layer stands here as its weight.
    """
    head, tied = family.size_of_head(config), family.tied(config)
    llama = ARCHITECTURES[family.model_type] == "llama"  # only there rows lie in ggml's rotary order
    places = []
    for name, shape in _weights(source).items():
        if (name == "lm_head.weight" and tied) or family.is_beyond(name, config):
            continue
        target = _target(name, family)
        rotary = llama and (".attn_q." in target or ".attn_k." in target)
        heads = shape[0] // head if rotary else 0
        offset = family.norm_offset if target.endswith("norm.weight") else 0.0
        places.append(TensorPlace(target, name, shape, heads, offset))
    return sorted(places, key=lambda place: _order(place.target))


def _weights(source: Checkpoint) -> dict[str, tuple[int, ...]]:
    plain = {name: tuple(source.tensors[name].info.shape) for name in source.plain_names()}
    layers = {f"{module}.weight": source.layer_shape(module) for module in source.formats}
    return plain | layers


def _target(name: str, family: Family) -> str:
    stem, _, last = name.rpartition(".")
    if last == "weight" and stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.weight"
    match = _LAYER.fullmatch(name)
    norms = _GEMMA_NORMS if family.norm_offset else _NORMS
    inside = (_INSIDE | norms).get(match[2]) if match else None
    architecture = ARCHITECTURES[family.model_type]
    if match is None or inside is None or (match[3] == "bias" and inside not in _BIASES[architecture]):
        raise InputError(f"tensor {name} has no place in a GGUF file of architecture '{architecture}'")
    return f"blk.{match[1]}.{inside}.{match[3]}"


def _order(target: str) -> tuple[int, int, str]:
    parts = target.split(".")
    if parts[0] == "blk":
        return 1, int(parts[1]), target
    return (0 if target == EMBEDDING else 2), 0, target
