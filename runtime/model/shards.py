"""Which outputs and inputs of every linear layer one tensor rank holds.

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
    """The share of every stage of a block, by its role."""
    names = {stage.role: config.family.modules(layer, stage) for stage in config.stages[layer]}
    (output,), (down,) = names["output"], names["down"]
    sizes = tuple(heads * config.head_dim for heads in (config.heads, config.kv_heads, config.kv_heads))
    queries, keys = (_rows_of(heads, config) for heads in (ranks.share(config.heads), ranks.kv_heads(config.kv_heads)))
    channels = _channels(checkpoint, config, ranks, names["gate_up"], down)
    return {
        "qkv": _cut_by_outputs(names["qkv"], (queries, keys, keys), sizes, config),
        "output": _cut_by_inputs(checkpoint, config, ranks, output, queries, sizes[0]),
        "gate_up": _cut_by_outputs(names["gate_up"], (channels, channels), (config.intermediate,) * 2, config),
        "down": _cut_by_inputs(checkpoint, config, ranks, down, channels, config.intermediate),
    }


def _rows_of(heads: slice, config: ModelConfig) -> slice:
    return slice(heads.start * config.head_dim, heads.stop * config.head_dim)


def _channels(
    checkpoint: Checkpoint, config: ModelConfig, ranks: Ranks, gate_up: tuple[str, ...], down: str
) -> Index:  # fmt: skip
    """The channels of the MLP that a rank holds: neighbours, or those of some act-order groups, group by group."""
    even, formats = ranks.share(config.intermediate), checkpoint.formats
    fmt = formats.get(down)
    lists = all(formats[name].output_unit == 1 for name in gate_up if name in formats)
    if fmt is None or not lists or fmt.needs_all_inputs(length(even)):
        return even
    groups = checkpoint.scattered_groups(down)
    unit = fmt.input_unit(config.intermediate)
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
