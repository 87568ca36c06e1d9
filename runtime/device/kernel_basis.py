"""What the choice of kernels for a model's layers rests on: measurements on this GPU, or estimates."""

from __future__ import annotations

from torch import Tensor

from quantkit.kernels.card import card_of
from quantkit.kernels.linear.dispatch import is_measured
from quantkit.kernels.linear.weight import LinearWeight, shape_of
from quantkit.runtime.model.layers import Weights


def kernel_basis(weights: Weights) -> str | None:
    """In a line for people; None where no table is ever asked, as on a CPU."""
    linears = [*(linear for block in weights.blocks for linear in block.linears), weights.head]
    layers = [weight for linear in linears for weight in linear.served if not isinstance(weight, Tensor)]
    return describe_layers([layer for layer in layers if layer.buckets])


def describe_layers(layers: list[LinearWeight]) -> str | None:
    if not layers:
        return None
    name = card_of(layers[0].device).name
    kinds = {(layer.kind, shape_of(layer)): layer for layer in layers}
    estimated = [shape for (_, shape), layer in kinds.items() if not is_measured(layer)]
    if not estimated:
        return f"kernels as measured on {name}"
    shapes = ",".join(dict.fromkeys(estimated))
    return (
        f"kernels of {len(estimated)} of {len(kinds)} kinds of layers are estimated for {name}, not measured; "
        f"`quantkit bench kernels --tune --shape {shapes}` with their --format measures them"
    )
