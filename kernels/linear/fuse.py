"""Layers that read the same input as one: queries, keys and values, or gate and up.

One matmul over all their outputs fills a GPU better than one after the other. What joins must agree in everything but
outputs: kind, groups, the order of columns; and every layer but the last must end where a tile of outputs ends. Each
weight class knows the rest: `LinearWeight.join`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.kernels.linear.weight import LinearWeight


def join(weights: Sequence[LinearWeight]) -> LinearWeight | None:
    """One weight with the outputs of all; None where they do not fit together."""
    if len(weights) == 1:
        return weights[0]
    if any(weight.outputs % weight.output_unit for weight in weights[:-1]):
        return None
    return weights[0].join(weights[1:])


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
