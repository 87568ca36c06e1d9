"""A model without weights, as transformers builds it from config.json: what a checkpoint is held against."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quantkit.arch import Family
from quantkit.checkpoint import Checkpoint
from quantkit.errors import InputError
from quantkit.expert_modules import separate_experts


def build_skeleton(checkpoint: Checkpoint, family: Family, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    """transformers' config and the model; inside its blocks everything has the names that files give it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    config = AutoConfig.for_model(**plain)
    # Soft caps and sinks exist only in the implementation that computes attention in full.
    config._attn_implementation = "eager" if family.attn_logit_softcapping or family.sinks else "sdpa"
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    blocks: Any = model.get_submodule(family.blocks)
    separate_experts(blocks, family, checkpoint.config)
    for block in blocks:
        _take_names_of_files(block, family)
    return config, model


def check_blocks(checkpoint: Checkpoint, family: Family) -> None:
    """Refuses a plain checkpoint whose blocks have other tensors than config.json asks for, or of other shapes."""
    _, model = build_skeleton(checkpoint, family, torch.float32)
    tensors = model.get_submodule(family.blocks).state_dict()
    expected = {f"{family.blocks}.{name}": list(tensor.shape) for name, tensor in tensors.items()}
    for name, wanted in expected.items():
        if name not in checkpoint.tensors:
            raise InputError(f"{checkpoint.folder} has no tensor {name}; the checkpoint is incomplete")
        if (found := list(checkpoint.tensors[name].info.shape)) != wanted:
            raise InputError(
                f"tensor {name} in {checkpoint.folder} has shape {found}, but config.json asks for {wanted}"
            )
    for name in checkpoint.tensors:
        known = name in expected or is_computed(name) or family.is_beyond(name, checkpoint.config)
        if name.startswith(f"{family.blocks}.") and not known:
            raise InputError(f"{checkpoint.folder} has a tensor {name}, which config.json knows nothing of")


def is_computed(name: str) -> bool:
    """Whether a tensor follows from config.json; older files hold it all the same."""
    return name.endswith(".rotary_emb.inv_freq")


def _take_names_of_files(block: nn.Module, family: Family) -> None:
    """Its own forward would not find its parts any more, but is never called."""
    for stored, module in family.renamed:
        block.add_module(stored, block.get_submodule(module))
        delattr(block, module)


def modules_by_block(checkpoint: Checkpoint, blocks: str) -> list[tuple[list[str], list[str]]]:
    """For every block: its plain tensors, and its quantized modules."""
    count = int(checkpoint.config["num_hidden_layers"])
    found: list[tuple[list[str], list[str]]] = [([], []) for _ in range(count)]
    for kind, names in enumerate((checkpoint.plain_names(), checkpoint.formats)):
        for name in names:
            if name.startswith(f"{blocks}.") and not is_computed(name):
                layer = int(name[len(blocks) + 1 :].partition(".")[0])
                if layer < count:
                    found[layer][kind].append(name)
    return found
