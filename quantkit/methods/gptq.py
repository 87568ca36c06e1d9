"""GPTQ: round column by column, and let the columns not yet rounded make up for each error (Frantar et al., 2022).

For a layer with inputs x the loss of rounded weights Q is tr((W - Q) H (W - Q)^T) with H = sum of x x^T. Columns are
taken in the order of their diagonal entry in H, largest first. The groups' scales are fixed before the columns are
reordered, so the order costs nothing at run time: groups stay contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import Format, IntegerFormat, IntegerWeight
from quantkit.formats.integer import contiguous_groups
from quantkit.kernels.reference import gptq as reference
from quantkit.methods.grid import search_grid
from quantkit.methods.losses import better_rows, output_loss
from quantkit.methods.options import GptqOptions

BLOCK = 128  # columns whose updates are applied to the rest in one matrix product


@dataclass(frozen=True)
class GptqResult:
    """The rounded weight with its loss and plain rounding's, row by row, and the damping that was needed."""

    quantized: IntegerWeight
    loss: Tensor  # [out] squared error of each output, summed over the calibration inputs
    rounding_loss: Tensor  # [out] the same for plain rounding
    damping: float  # as a share of H's mean diagonal; 0 where calibration never reached the layer


def require_integer(method: str, fmt: Format) -> IntegerFormat:
    if not isinstance(fmt, IntegerFormat):
        raise InputError(f"method '{method}' needs a format with an integer grid, not '{fmt.name}'; use method 'rtn'")
    return fmt


def quantize_layer(weight: Tensor, fmt: Format, hessian: Tensor, options: GptqOptions | None = None) -> GptqResult:
    """Rounds a weight [out, in] for a layer whose inputs gave this H [in, in].

    No row is worse than plainly rounded, except that rows of scattered groups cannot be exchanged one by one.
    """
    options = options or GptqOptions()
    fmt = require_integer("gptq", fmt)
    plain = fmt.quantize(weight)
    rounding_loss = output_loss(weight, plain, hessian)
    dead = hessian.diagonal() == 0
    if bool(dead.all()):  # calibration never reached this layer
        return GptqResult(plain, rounding_loss, rounding_loss, 0.0)
    order = _order(hessian, options.order)
    factor, damping = inverse_factor(hessian, order, options.damping)
    grid = _grid(weight, fmt, hessian, order, options)
    codes = _round_columns(weight.float().masked_fill(dead, 0.0)[:, order], grid, order, factor)
    quantized = replace(grid, codes=codes)
    loss = output_loss(weight, quantized, hessian)
    if quantized.group_of is None:  # a row so easy that compensation only adds noise: rare
        quantized, loss = better_rows(quantized, loss, plain, rounding_loss)
    return GptqResult(quantized, loss, rounding_loss, damping)


def inverse_factor(hessian: Tensor, order: Tensor, damping: float) -> tuple[Tensor, float]:
    """The upper Cholesky factor of (H + damping)^-1 with H's columns in an order, and the damping that was needed.

    The damping grows tenfold until the factor exists. H is the largest thing in memory here: no copy outlives its use.
    """
    diagonal = hessian.diagonal()
    diagonal = torch.where(diagonal == 0, 1.0, diagonal)[order]  # inputs that are always zero: any weight will do
    mean = float(diagonal.mean())
    while damping <= 1.0:
        damped = hessian[order[:, None], order]
        damped.diagonal().copy_(diagonal + damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not bool(failed):
            inverse = torch.cholesky_inverse(lower)
            del lower
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            del inverse
            if not bool(failed) and bool(torch.isfinite(upper).all()):
                return upper, damping
        damping *= 10
    raise InputError("the inputs of this layer are not finite or not usable for GPTQ; use method 'rtn' for it")


def _order(hessian: Tensor, kind: str) -> Tensor:
    """The order in which columns are rounded."""
    if kind == "none":
        return torch.arange(len(hessian), device=hessian.device)
    return torch.argsort(hessian.diagonal(), descending=True, stable=True)


def _grid(weight: Tensor, fmt: IntegerFormat, hessian: Tensor, order: Tensor, options: GptqOptions) -> IntegerWeight:
    """Scales and zero points for all groups; under desc_act the groups follow the order of the columns."""
    scattered = options.order == "desc_act" and fmt.group_size != -1
    if scattered:
        weight, hessian = weight[:, order], hessian[order][:, order]
    grid = search_grid(weight, fmt, hessian) if options.grid == "search" else fmt.quantize(weight)
    if not scattered:
        return grid
    group_of = torch.empty_like(order, dtype=torch.int32)
    group_of[order] = contiguous_groups(len(order), grid.group_size, order.device)
    return replace(grid, group_of=group_of)


def _round_columns(weight: Tensor, grid: IntegerWeight, order: Tensor, factor: Tensor) -> Tensor:
    """Codes [out, in] of a weight whose columns stand in the given order."""
    columns = weight.T.contiguous()  # [in, out]: one column of the weight is one run of memory
    del weight
    group = grid.input_groups()[order]
    scales, zeros = grid.scales.float().T.contiguous(), grid.zeros.float().T.contiguous()  # [groups, out]
    top = (1 << grid.bits) - 1
    codes = torch.empty_like(columns, dtype=torch.uint8)
    round_block = _kernel(columns.device)
    for start in range(0, len(columns), BLOCK):
        end = min(start + BLOCK, len(columns))
        rows = group[start:end]
        codes[start:end], errors = round_block(
            columns[start:end], scales[rows], zeros[rows], factor[start:end, start:end], top
        )
        columns[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    result = torch.empty_like(codes)
    result[order] = codes
    return result.T.contiguous()


def _kernel(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """What rounds one block of columns: a kernel on a GPU, plain torch elsewhere."""
    if device.type == "cuda":
        from quantkit.kernels.gptq_columns import round_columns

        return round_columns
    return reference.round_columns
