"""Coordinate descent over codes: each column once more to the code that is best with all others as they are now.

GPTQ rounds a column when it does not know yet what the later ones will make of its error. Afterwards it does. A sweep
goes through the columns in GPTQ's order; scales and zero points stay, and no step makes e H e^T larger.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.formats import IntegerWeight

BLOCK = 128  # columns whose moves reach the gradients of all others in one matrix product


def descend(weight: Tensor, start: IntegerWeight, hessian: Tensor, order: Tensor, sweeps: int) -> IntegerWeight:
    """Codes that are nearer to a weight [out, in] than those of `start`; every input needs an entry on H's diagonal."""
    group, top = start.input_groups(), (1 << start.bits) - 1
    scales, zeros = start.scales.float().T[group], start.zeros.float().T[group]  # [in, out], as all below
    codes = start.codes.float().T.contiguous()
    values = (codes - zeros).mul_(scales)
    downhill = hessian @ (weight.float().T - values)
    for _ in range(sweeps):
        for columns in order.split(BLOCK):
            moves, slopes, near = torch.zeros_like(codes[columns]), downhill[columns], hessian[columns][:, columns]
            for place, column in enumerate(columns.tolist()):
                wanted = values[column] + slopes[place] / near[place, place]
                codes[column] = torch.round(wanted / scales[column]).add_(zeros[column]).clamp_(0, top)
                moved = (codes[column] - zeros[column]).mul_(scales[column])
                moves[place] = moved - values[column]
                values[column] = moved
                slopes.addr_(near[place], moves[place], alpha=-1)
            downhill.addmm_(hessian[:, columns], moves, alpha=-1)
    return replace(start, codes=codes.to(torch.uint8).T.contiguous())
