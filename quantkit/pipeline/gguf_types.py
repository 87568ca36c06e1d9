"""Which type every matrix of a model gets in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.arch import Family
from quantkit.checkpoint import Checkpoint
from quantkit.formats import Format, Gguf
from quantkit.formats.gguf.mixes import Matrix, Role

_ROLES: dict[str, Role] = {
    "embed_tokens": "embedding",
    "lm_head": "output",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "qkv_proj": "v",
    "o_proj": "attention_output",
    "gate_proj": "gate",
    "up_proj": "up",
    "gate_up_proj": "up",
    "down_proj": "down",
}


def by_matrix(plan: Mapping[str, Format | None], family: Family, source: Checkpoint) -> dict[str, Format | None]:
    """A recipe's plan with the type of every layer in place of the mix."""
    return {
        module: fmt.of_matrix(matrix_of(module, source, family)) if isinstance(fmt, Gguf) else fmt
        for module, fmt in plan.items()
    }


def outside_formats(mix: Gguf, family: Family, source: Checkpoint) -> dict[str, Gguf]:
    """Of embeddings and output layer, where these are rounded too."""
    outer = family.blocks.rpartition(".")[0]
    modules = [f"{outer}.embed_tokens", *([] if family.tied(source.config) else ["lm_head"])]
    found = {module: mix.of_matrix(matrix_of(module, source, family)) for module in modules}
    return {module: fmt for module, fmt in found.items() if fmt is not None}


def matrix_of(module: str, source: Checkpoint, family: Family) -> Matrix:
    """What a mix looks at."""
    config = source.config
    heads = int(config["num_attention_heads"])
    role = _ROLES[module.rpartition(".")[2]]
    if role == "embedding" and family.tied(config):
        role = "output"
    inside = module.removeprefix(f"{family.blocks}.").partition(".")[0]
    return Matrix(
        role,
        source.tensors[f"{module}.weight"].info.shape[1],
        int(config["num_hidden_layers"]),
        heads // int(config.get("num_key_value_heads") or heads),
        int(inside) if inside.isdecimal() else 0,
    )
