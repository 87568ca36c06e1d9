"""What each scheme would cost a group of layers, predicted from the few that were measured.

KL divergence of the model's predictions grows with the squared error of a layer's outputs, and a little faster where
it is large: on the bundled model 2 bits cost 1.0 to 1.5 times what 3 bits say, all finer schemes what 3 bits say
within 16 %. So two schemes are measured, and the others follow by the errors that rounding to the nearest makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.formats import IntegerFormat
from quantkit.methods.grid import search_grid
from quantkit.methods.losses import output_loss

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (128, 64, 32)
PROBE_BITS = (3, 2)
SAMPLED_ROWS = 64  # of a layer's outputs: enough for the ratio of two schemes' errors


@dataclass(frozen=True)
class Sensitivity:
    """What one group of layers loses by itself."""

    modules: tuple[str, ...]
    errors: Mapping[IntegerFormat, float]  # of rounding to the nearest, by scheme
    measured: Mapping[IntegerFormat, float]  # KL in nats a token, rounded by the recipe's method; two schemes

    def divergence(self, fmt: IntegerFormat) -> float:
        """KL that a scheme would cost: its error times KL per error, which changes evenly between the two measured."""
        error = self.errors[fmt]
        fine, coarse = sorted((self.errors[probe], kl) for probe, kl in self.measured.items())
        share = (error - fine[0]) / (coarse[0] - fine[0]) if coarse[0] > fine[0] else 0.0
        low, high = (kl / of if of else 0.0 for of, kl in (fine, coarse))
        return error * (low + min(max(share, 0.0), 1.0) * (high - low))


def candidates(fmt: IntegerFormat, inputs: int) -> list[IntegerFormat]:
    """The schemes that a layer may take, like `fmt` but for bits and group size; per row only where no group fits."""
    sizes = [size for size in GROUP_SIZES if inputs % size == 0] or [-1]
    return [replace(fmt, bits=bits, group_size=size) for bits in BITS for size in sizes]


def probes(fmt: IntegerFormat, inputs: int) -> list[IntegerFormat]:
    """The schemes to measure: with the recipe's own groups where they fit."""
    sizes = [each.group_size for each in candidates(fmt, inputs)]
    size = fmt.group_size if fmt.group_size in sizes else sizes[0]
    return [replace(fmt, bits=bits, group_size=size) for bits in PROBE_BITS]


def rounding_errors(
    weight: Tensor, schemes: Iterable[IntegerFormat], hessian: Tensor, *, search: bool
) -> dict[IntegerFormat, float]:
    """Squared output errors of rounding to the nearest, on a sample of a weight's rows; `search`: on the best grid."""
    rows = torch.linspace(0, len(weight) - 1, min(SAMPLED_ROWS, len(weight)), device=weight.device).round().long()
    sample = weight[rows].float()
    errors = {}
    for fmt in schemes:
        rounded = search_grid(sample, fmt, hessian) if search else fmt.quantize(sample)
        errors[fmt] = float(output_loss(sample, rounded, hessian).sum())
    return errors
