"""Rounding to GGUF blocks: scales searched by the importance of every input, codes by GPTQ on the grid they make.

The importance of an input column is the mean of its squares, as in llama.cpp's importance matrix. Scales are fixed by
the search (`quantkit/formats/gguf/search.py`); then columns are rounded one after the other, and those not yet rounded
make up for each error. A row that this does not improve keeps the codes of the search. Before that, columns may be
scaled as by AWQ; which scales are best is measured on plain integers like those of the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.formats import CtPacked, Format, Gguf, GgufWeight, IntegerFormat
from quantkit.formats.gguf.weight import table_of
from quantkit.methods.awq import AwqMethod
from quantkit.methods.columns import BLOCK, round_in_order
from quantkit.methods.costing import GroupWork, Speed
from quantkit.methods.gptq import GptqMethod, column_order, inverse_factor
from quantkit.methods.losses import output_loss
from quantkit.methods.method import UNREACHED, Method, Rounded, ScaleChoice, Tie, require_one_of
from quantkit.methods.statistics import InputStatistics

_SMALLEST = 1e-30  # a scale of 0 would divide by nothing; its codes mean 0 whatever they are


@dataclass(frozen=True)
class BlockSearchMethod(Method):
    """`rounding` of codes: `gptq`, or `nearest` to the searched scales. `scaling` of input columns before: `none`, or
    `awq`."""

    name: ClassVar[str] = "block-search"
    rounding: str = "gptq"
    scaling: str = "none"
    damping: float = 0.1  # of H: with text unlike what is served later, less of it overfits (docs/reference/gguf.md)

    def __post_init__(self) -> None:
        require_one_of("rounding", self.rounding, ("gptq", "nearest"))
        require_one_of("scaling", self.scaling, ("none", "awq"))
        if not 0 < self.damping <= 1:
            raise InputError(f"damping is {self.damping}, but must be above 0 and at most 1")

    @property
    def wants_hessian(self) -> bool:
        return True

    @property
    def scales_inputs(self) -> bool:
        return self.scaling == "awq"

    def check(self, fmt: Format) -> None:
        if not isinstance(fmt, Gguf):
            raise InputError(f"method '{self.name}' rounds to GGUF blocks, not to '{fmt.name}'; use gptq or rtn")

    def choose_scales(self, weight: Tensor, fmt: Format, inputs: InputStatistics, tie: Tie) -> ScaleChoice:
        assert isinstance(fmt, Gguf)
        return AwqMethod().choose_scales(weight, _integers_like(fmt), inputs, tie)

    def round(self, weight: Tensor, fmt: Format, inputs: InputStatistics) -> Rounded:
        assert isinstance(fmt, Gguf)
        hessian = inputs.require_hessian()
        importance = hessian.diagonal()
        if bool((importance == 0).all()):
            return Rounded(fmt.search(weight), notes={"warning": UNREACHED})
        found = fmt.search(weight, importance)
        loss = output_loss(weight, found, hessian)
        if self.rounding == "nearest":
            return Rounded(found, loss, loss)
        order = column_order(hessian, "static")
        factor, damping = inverse_factor(hessian, order, self.damping)
        moved = replace(found, codes=round_to_blocks(weight, found, order, factor))
        moved_loss = output_loss(weight, moved, hessian)
        better = moved_loss < loss
        codes = torch.where(better[:, None], moved.codes, found.codes)
        notes = {"damping": damping}
        return Rounded(replace(found, codes=codes), torch.minimum(loss, moved_loss), loss, notes)

    def cost_seconds(self, group: GroupWork, tokens: int, speed: Speed) -> float:
        if self.rounding == "nearest":
            return group.weights * speed.rounding_seconds + group.hessian_flops / speed.float32_flops
        searched = GptqMethod(grid="minmax", target="layer")  # the search is the format's own rounding
        return searched.cost_seconds(group, tokens, speed)


def _integers_like(fmt: Gguf) -> IntegerFormat:
    """Integers with as many bits and in groups as large, with zero points where the blocks have minimums."""
    kind = fmt.blocks
    return CtPacked(bits=kind.bits, group_size=kind.group, sym=not kind.has_mins)


def round_to_blocks(weight: Tensor, grid: GgufWeight, order: Tensor, factor: Tensor) -> Tensor:
    """Codes [out, in] of a weight on the grid of another, by GPTQ with H's factor in this order of columns."""
    lows = grid.group_lows
    shifted = weight.float() if lows is None else weight.float() - lows.repeat_interleave(grid.group, 1)
    scales = grid.group_scales.T.contiguous()  # [groups, out]
    scales = torch.where(scales == 0, _SMALLEST, scales)
    group = torch.arange(weight.shape[1], device=weight.device)[order] // grid.group
    if grid.kind.table:
        return _round_to_table(shifted[:, order], grid, scales, group, order, factor)
    zeros = torch.full_like(scales, float(grid.kind.zero))
    columns, top = shifted.T[order], (1 << grid.kind.bits) - 1
    return round_in_order(columns[None], scales[None], zeros[None], group[None], top, order[None], factor[None])[0]


def _round_to_table(
    weight: Tensor, grid: GgufWeight, scales: Tensor, group: Tensor, order: Tensor, factor: Tensor
) -> Tensor:
    """The same where codes are places in a table."""
    table = table_of(grid.kind).to(weight.device)
    between = (table[1:] + table[:-1]) / 2
    columns = weight.T.contiguous()  # [in, out]
    codes = torch.empty_like(columns, dtype=torch.uint8)
    pivots = factor.diagonal().tolist()
    for start in range(0, len(columns), BLOCK):
        end = min(start + BLOCK, len(columns))
        errors = torch.empty_like(columns[start:end])
        for place in range(start, end):
            scale = scales[group[place]]
            chosen = torch.bucketize(columns[place] / scale, between)
            codes[place] = chosen.to(torch.uint8)
            error = (columns[place] - table[chosen] * scale) / pivots[place]
            columns[place + 1 : end].addr_(factor[place, place + 1 : end], error, alpha=-1)
            errors[place - start] = error
        columns[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    result = torch.empty_like(codes)
    result[order] = codes
    return result.T.contiguous()
