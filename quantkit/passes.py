"""One pass over a model's layers by a method: which weights it sees, in which order, with which statistics.

rounding   every layer by itself, straight from the files
gptq       block by block: each group of layers sees what the quantized layers before it produce
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.arch import Family
from quantkit.blocks import BlockRunner, run_block
from quantkit.checkpoint import Checkpoint, require_finite
from quantkit.formats import Format, QuantizedWeight
from quantkit.methods import gptq

BATCH = 8  # sequences run through a block at once


@dataclass(frozen=True)
class QuantizedLayer:
    """What a method made of one layer, with the numbers it wants logged."""

    module: str
    weight: Tensor  # as it was
    quantized: QuantizedWeight
    log: Mapping[str, float]


def rounding(source: Checkpoint, chosen: Mapping[str, Format]) -> Iterator[QuantizedLayer]:
    """Plain rounding of every chosen layer."""
    for module, fmt in chosen.items():
        weight = source.tensor(f"{module}.weight")
        require_finite(f"{module}.weight", weight)
        yield QuantizedLayer(module, weight, fmt.quantize(weight), {})


def calibrated_gptq(
    source: Checkpoint, family: Family, chosen: Mapping[str, Format], tokens: Tensor
) -> Iterator[QuantizedLayer]:
    """GPTQ over all blocks. Calibration tokens [samples, length]."""
    runner = BlockRunner(source, family.blocks)
    states, arguments = runner.start(tokens)
    hidden = torch.cat(states)  # [samples, length, hidden]
    for layer, extra in enumerate(arguments):
        block = runner.load(layer)
        for names, group in zip(family.groups, family.groups_of(layer), strict=True):
            if group[0] not in chosen:  # fused layers share a scheme, so none of them is
                continue
            hessian = _group_hessian(block, names[0], hidden, extra)
            for name, module in zip(names, group, strict=True):
                yield _gptq_layer(block.get_submodule(name), module, chosen[module], hessian)
        hidden = torch.cat([run_block(block, part, extra) for part in hidden.split(BATCH)])
        runner.free(layer)


def _gptq_layer(linear: nn.Module, module: str, fmt: Format, hessian: Tensor) -> QuantizedLayer:
    """Quantizes one linear and leaves its decoded weight in the block, for the layers behind it to see."""
    weight = linear.weight.data
    assert isinstance(weight, Tensor)
    result = gptq.quantize_layer(weight, fmt, hessian)
    linear.weight.data = result.quantized.dequantize()
    log = {"loss": result.loss, "rounding_loss": result.rounding_loss, "damping": result.damping}
    return QuantizedLayer(module, weight, result.quantized, log)


def _group_hessian(block: nn.Module, name: str, hidden: Tensor, extra: Mapping[str, Any]) -> Tensor:
    """H of the inputs that a linear of the block sees, with the block as it is now."""
    linear = block.get_submodule(name)
    collected: list[gptq.Hessian] = []

    def collect(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not collected:
            collected.append(gptq.Hessian(inputs[0].shape[-1]))
        collected[0].add(inputs[0])

    hook = linear.register_forward_pre_hook(collect)
    try:
        for part in hidden.split(BATCH):
            run_block(block, part, extra)
    finally:
        hook.remove()
    return collected[0].matrix
