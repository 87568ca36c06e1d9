"""Weights on symmetric grids of which about half run the other way: the search over such grids may choose so.

    from signed_scales import with_signs
    quantized = with_signs(fmt.quantize(weight))

A test of a kernel that makes its weights so shows that negative scales are right, for nothing.
"""

from dataclasses import replace

import torch

from quantkit.formats import IntegerWeight, QuantizedWeight


def with_signs(weight: QuantizedWeight) -> QuantizedWeight:
    """The same codes, about half the scales negative; other than symmetric integers come back as they are."""
    if not isinstance(weight, IntegerWeight) or not weight.symmetric:
        return weight
    generator = torch.Generator().manual_seed(5)  # on the CPU: the same signs on every device
    signs = 2 * torch.randint(0, 2, weight.scales.shape, generator=generator) - 1
    return replace(weight, scales=weight.scales * signs.to(weight.scales))
