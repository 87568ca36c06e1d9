"""Which outputs and inputs of every linear layer one tensor rank holds; of experts it has some whole (`ranks.py`).

Queries, keys, values, gate and up are cut by outputs: heads, and channels of the MLP. Attention output and down are cut
by the inputs that fit, and what the ranks compute is added. Two kinds of layers cannot be cut by inputs and still mean
the same: formats that round all inputs of a token together, and an attention output whose act-order groups lie across
heads. Such a layer is `gathered`: every rank gets all inputs, computes some outputs, and these are put together.

An MLP's channels have no order of their own. Where act-order scattered the groups of a down projection, each rank takes
whole groups of it, and of gate and up the channels that these groups read; so nothing is permuted at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.arch.sizes import LatentSizes
from quantkit.checkpoint import Checkpoint
from quantkit.formats import Index
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.ranks import Ranks


@dataclass(frozen=True)
class Share:
    """What one rank holds of one module: sections of outputs, behind each other, and inputs."""

    outputs: tuple[Index, ...]
    inputs: Index


@dataclass(frozen=True)
class GroupShare:
    """What one rank holds of layers that read the same input."""

    modules: tuple[Share, ...]
    gathered: bool = False
    adds_bias: bool = True  # a bias is added to a sum once


def share_of_block(checkpoint: Checkpoint, config: ModelConfig, ranks: Ranks, layer: int) -> dict[str, GroupShare]:
    """The share of every stage of a block, by its role; experts are not among them, because ranks have some whole."""
    stages = {stage.role: stage for stage in config.stages[layer]}
    names = {role: config.family.modules(layer, stage) for role, stage in stages.items()}
    if config.latent is None:
        found = _attention(checkpoint, config, ranks, names)
    else:
        found = _latent_attention(checkpoint, config, ranks, names, config.latent)
    for kind in ("", "shared_"):
        gate_up, down = f"{kind}gate_up", f"{kind}down"
        if gate_up in stages and not stages[gate_up].routed:
            width = config.width(stages[gate_up])
            channels = _channels(checkpoint, width, ranks, names[gate_up], names[down][0])
            found[gate_up] = _cut_by_outputs(names[gate_up], (channels, channels), (width, width), config)
            found[down] = _cut_by_inputs(checkpoint, config, ranks, names[down][0], channels, width)
    return found


def _attention(
    checkpoint: Checkpoint, config: ModelConfig, ranks: Ranks, names: dict[str, tuple[str, ...]]
) -> dict[str, GroupShare]:
    sizes = tuple(heads * config.head_dim for heads in (config.heads, config.kv_heads, config.kv_heads))
    own = (ranks.share(config.heads), ranks.kv_heads(config.kv_heads))
    queries, keys = (_rows_of(heads, config.head_dim) for heads in own)
    return {
        "qkv": _cut_by_outputs(names["qkv"], (queries, keys, keys), sizes, config),
        "output": _cut_by_inputs(checkpoint, config, ranks, names["output"][0], queries, sizes[0]),
    }


def _latent_attention(
    checkpoint: Checkpoint, config: ModelConfig, ranks: Ranks, names: dict[str, tuple[str, ...]], latent: LatentSizes
) -> dict[str, GroupShare]:
    """Latents are of all heads, so every rank makes and keeps them whole; queries and outputs are of its own heads."""
    heads = ranks.share(config.heads)
    queries, kept = _rows_of(heads, latent.query), slice(0, latent.kept)
    first = queries if latent.query_rank is None else slice(0, latent.query_rank)
    attended = _rows_of(heads, latent.value)
    found = {
        "qkv": GroupShare(tuple(Share((part,), slice(0, config.hidden)) for part in (first, kept))),
        "output": _cut_by_inputs(checkpoint, config, ranks, names["output"][0], attended, config.attended),
    }
    if latent.query_rank is not None:
        found["q_b"] = GroupShare((Share((queries,), slice(0, latent.query_rank)),))
    return found


def _rows_of(heads: slice, each: int) -> slice:
    return slice(heads.start * each, heads.stop * each)


def _channels(checkpoint: Checkpoint, width: int, ranks: Ranks, gate_up: tuple[str, ...], down: str) -> Index:
    """The channels of the MLP that a rank holds: neighbours, or those of some act-order groups, group by group."""
    even, formats = ranks.share(width), checkpoint.formats
    fmt = formats.get(down)
    lists = all(formats[name].output_unit == 1 for name in gate_up if name in formats)
    if fmt is None or not lists or fmt.needs_all_inputs(length(even)):
        return even
    groups = checkpoint.scattered_groups(down)
    unit = fmt.input_unit(width)
    if groups is None or length(even) % unit or bool((groups.long().bincount() != unit).any()):
        return even
    return torch.argsort(groups, stable=True)[even]


def _cut_by_outputs(
    names: tuple[str, ...], parts: tuple[Index, ...], sizes: tuple[int, ...], config: ModelConfig
) -> GroupShare:
    """`parts` of matrices of these sizes, which are a module each, or stand in one module behind each other."""
    inputs = slice(0, config.hidden)
    if len(names) > 1:
        return GroupShare(tuple(Share((part,), inputs) for part in parts))
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return GroupShare((Share(tuple(map(_shifted, parts, starts)), inputs),))


def _cut_by_inputs(
    checkpoint: Checkpoint, config: ModelConfig, ranks: Ranks, name: str, inputs: Index, size: int
) -> GroupShare:
    if _must_gather(checkpoint, name, inputs, size):
        return GroupShare((Share((ranks.share(config.hidden),), slice(0, size)),), gathered=True)
    return GroupShare((Share((slice(0, config.hidden),), inputs),), adds_bias=ranks.tensor_rank == 0)


def _must_gather(checkpoint: Checkpoint, name: str, inputs: Index, size: int) -> bool:
    fmt = checkpoint.formats.get(name)
    if fmt is None or isinstance(inputs, Tensor):
        return False
    if fmt.needs_all_inputs(length(inputs)) or length(inputs) % fmt.input_unit(size):
        return True
    return checkpoint.scattered_groups(name) is not None


def _shifted(index: Index, start: int) -> Index:
    return index + start if isinstance(index, Tensor) else slice(index.start + start, index.stop + start)


def pieces(section: Index, unit: int) -> Iterator[Index]:
    """A section as pieces that one weight can hold each: the outputs before the first whole unit stand alone."""
    if isinstance(section, Tensor) or section.start % unit == 0:
        yield section
        return
    border = min(-(-section.start // unit) * unit, section.stop)
    yield slice(section.start, border)
    if border < section.stop:
        yield slice(border, section.stop)


def length(index: Index) -> int:
    return len(index) if isinstance(index, Tensor) else index.stop - index.start
