"""The experts of a layer from a checkpoint into stacked weights, one linear after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from quantkit.formats import Format
from quantkit.kernels.linear.grouped.stacks import stack_of
from quantkit.kernels.linear.grouped.weight import GroupedWeight, lay_out_half, why_not
from quantkit.runtime.model.config import ModelConfig
from quantkit.runtime.model.reader import Reader

# Of an expert that is not the first of its layer: that one has the same kernels and was tried whole. Trying all rows of
# all experts took four fifths of loading NF4 and LLM.int8 on a CPU.
TRIED_ROWS = 128


def why_not_stacked(config: ModelConfig, layer: int, formats: Mapping[str, Format]) -> str | None:
    """Why experts of a layer cannot be two weights for routed kernels; None where they can. `formats` by module."""
    for stage in config.stages[layer]:
        if stage.routed:
            found = (formats.get(module) for module in config.family.modules(layer, stage))
            if reason := why_not(found, config.inputs(stage)):
                return reason
    return None


def slow_experts(config: ModelConfig, formats: Mapping[str, Format]) -> list[str]:
    """The reasons for which experts of a model run without routed kernels on a GPU."""
    routed = (layer for layer, stages in enumerate(config.stages) if any(stage.routed for stage in stages))
    return sorted({reason for layer in routed if (reason := why_not_stacked(config, layer, formats))})


def formats_of_layers(config: ModelConfig, formats: Mapping[str, Format]) -> list[Format]:
    """Of the quantized linears that run by themselves: all but those of experts that are stacked."""
    stacked = {
        module
        for layer, stages in enumerate(config.stages)
        if why_not_stacked(config, layer, formats) is None
        for stage in stages
        if stage.routed
        for module in config.family.modules(layer, stage)
    }
    return [fmt for module, fmt in formats.items() if module not in stacked]


def read_stack(
    reader: Reader, modules: Sequence[str], outputs: int, inputs: int, *, biased: bool = False
) -> GroupedWeight:
    """Linears of one shape, in the order of planes."""
    bias = None
    if biased:
        bias = torch.stack([reader.tensor(f"{name}.bias", (outputs,)) for name in modules])
    if modules[0] not in reader.checkpoint.formats:
        values = torch.empty(len(modules), outputs, inputs, dtype=reader.dtype, device=reader.device)
        for plane, name in zip(values, modules, strict=True):
            reader.fill(plane, f"{name}.weight", (outputs, inputs))
        return lay_out_half(values, bias)
    stack = stack_of(reader.checkpoint.formats[modules[0]], len(modules))
    quick = replace(reader, tried_rows=TRIED_ROWS)
    for number, name in enumerate(modules):
        with reader.checkpoint.naming(name):
            stack.put(number, (quick if number else reader).plane(name, outputs, inputs))
    return stack.finish(bias)
