"""The experts of a layer from a checkpoint into stacked weights, one linear after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quantkit.kernels.linear.grouped.weight import GroupedWeight, PackedStack, lay_out_half, why_not
from quantkit.runtime.model.reader import Reader

# Of an expert that is not the first of its layer: that one has the same kernels and was tried whole. Trying all rows of
# all experts took four fifths of loading NF4 and LLM.int8 on a CPU.
TRIED_ROWS = 128


def why_not_stacked(reader: Reader, modules: Sequence[str], inputs: int, *, biased: bool) -> str | None:
    """Why experts of these linears cannot be one weight for routed kernels; None where they can."""
    if biased:
        return "they have biases"
    return why_not((reader.checkpoint.formats.get(name) for name in modules), inputs)


def read_stack(reader: Reader, modules: Sequence[str], outputs: int, inputs: int) -> GroupedWeight:
    """Linears of one shape, in the order of planes."""
    if modules[0] not in reader.checkpoint.formats:
        values = torch.empty(len(modules), outputs, inputs, dtype=reader.dtype, device=reader.device)
        for plane, name in zip(values, modules, strict=True):
            reader.fill(plane, f"{name}.weight", (outputs, inputs))
        return lay_out_half(values)
    stack = PackedStack(len(modules))
    quick = replace(reader, tried_rows=TRIED_ROWS)
    for number, name in enumerate(modules):
        with reader.checkpoint.naming(name):
            stack.put(number, (quick if number else reader).packed(name, outputs, inputs))
    return stack.finish()
