"""Memory of one rank: its share of the weights, and what it may use of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.device.memory import available_memory
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.ranks import Ranks, local_config
from quantkit.runtime.model.weight_sizes import tensor_bytes


def rank_weight_bytes(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, ranks: Ranks, arithmetic: str | None = None
) -> int:
    """What the weights of one rank take on its device, from the headers of the files."""
    shares = _linear_shares(config, ranks)
    sizes = tensor_bytes(checkpoint, dtype, arithmetic).items()
    return round(sum(size * _share(name, config, ranks, shares) for name, size in sizes))


def _share(name: str, config: ModelConfig, ranks: Ranks, shares: dict[str, float]) -> float:
    """Of one tensor, that a rank holds."""
    prefix = f"{config.family.blocks}."
    if name.startswith(prefix):
        layer = int(name.removeprefix(prefix).partition(".")[0])
        if layer not in ranks.blocks(config.layers):
            return 0.0
        return shares.get(name.rpartition(".")[0], 1.0)  # norms are everywhere
    if name.startswith("model.norm."):
        return float(ranks.last_stage)
    rows = ranks.vocabulary(config.vocab)  # of embedding and head
    return (rows.stop - rows.start) / config.vocab if ranks.first_stage else 0.0


def _linear_shares(config: ModelConfig, ranks: Ranks) -> dict[str, float]:
    """Of every linear layer, and of sinks. Key and value heads that ranks hold together count for each of them."""
    local = local_config(config, ranks)
    found = {}
    for layer, stages in enumerate(config.stages):
        if config.family.sinks:
            found[f"{config.family.blocks}.{layer}.self_attn"] = 1 / ranks.tensor
        for stage in stages:
            modules = config.family.modules(layer, stage)
            if stage.experts is not None:
                own, each = ranks.own_experts(stage.experts.count), len(stage.names)
                found |= {module: float(place // each in own) for place, module in enumerate(modules)}
            elif stage.role == "qkv":
                sizes = zip(modules, local.outputs(stage), config.outputs(stage), strict=True)
                found |= {module: part / whole for module, part, whole in sizes}
            else:
                found |= dict.fromkeys(modules, 1 / ranks.tensor)
    return found


def available_to_rank(options: EngineOptions, ranks: Ranks) -> int:
    """Bytes. Ranks on a CPU share the machine's memory, those on GPUs have one each."""
    found = available_memory(options.torch_device, options.memory_share)
    return found // ranks.world if options.torch_device.type == "cpu" else found


def resident_bytes(weights: object) -> int:
    """Of all tensors in loaded weights; memory that several of them use counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(weights)}
    return sum(storages.values())


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
