"""Tiles of a product, the programs that share one by splitting its inputs, and how their parts are added in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.linear.weight import TICKETS
from quantkit.kernels.linear.weight_only.unpack import to_half

_SPLITS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
MOST_TILES = 65535  # of outputs: as many programs as a grid may have in its second direction


class Tile(Protocol):
    """The part of a config that cuts a product."""

    @property
    def outputs(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def splits(self) -> int: ...


@dataclass(frozen=True)
class Cut:
    """The grid (tiles of tokens, tiles of outputs, splits), the steps of a split, and room for the splits' parts."""

    grid: tuple[int, int, int]
    per_split: int
    partial: Tensor  # float32, empty where nothing is split


def cut(kernel: str, tokens: int, outputs: int, rows: int, steps: int, tile: Tile, device: torch.device) -> Cut:
    """How a product of this size is shared out; `rows` are the padded outputs, `steps` the inputs in steps."""
    if rows % tile.outputs:
        raise InputError(f"{kernel}: tiles of {tile.outputs} outputs do not divide {rows} padded outputs")
    across, down = triton.cdiv(tokens, tile.tokens), triton.cdiv(outputs, tile.outputs)
    if down > MOST_TILES:
        raise InputError(f"{kernel}: {outputs} outputs in tiles of {tile.outputs} are more than {MOST_TILES} tiles")
    per_split = triton.cdiv(steps, tile.splits)
    splits = triton.cdiv(steps, per_split)  # none of them empty
    if splits > 1 and across * down > TICKETS:
        raise InputError(f"{kernel}: {across * down} tiles share their inputs, but at most {TICKETS} can")
    room = across * down * splits * tile.outputs * tile.tokens if splits > 1 else 0
    return Cut((across, down, splits), per_split, torch.empty(room, dtype=torch.float32, device=device))


def splits_to_try(outputs: int, tile: int, most: int, tokens: int, steps: int) -> list[int]:
    """Splits worth a measurement, for tiles of so many outputs and tokens."""
    tiles = -(-outputs // tile) * -(-most // tokens)
    if -(-outputs // tile) > MOST_TILES:
        return []
    return [n for n in _SPLITS if n == 1 or (tiles * n <= 3200 and tiles <= TICKETS and 2 * n <= steps and most <= 256)]


@triton.jit
def leave_part(acc, parts, split, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores what one split has of a tile."""
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(parts + split * (ROWS * COLUMNS) + place, acc)


@triton.jit
def arrives_last(ticket, splits):
    """Whether all parts of a tile are there; then the ticket is 0 again, for the next call."""
    tl.debug_barrier()  # every thread's part is stored before the ticket is taken
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == splits - 1
    if last:
        tl.debug_barrier()
        tl.store(ticket, 0)
    return last


@triton.jit
def sum_of_parts(parts, splits, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a tile, in the order of the splits."""
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    acc = tl.load(parts + place, cache_modifier=".cg")
    for other in range(1, splits):
        acc += tl.load(parts + other * (ROWS * COLUMNS) + place, cache_modifier=".cg")
    return acc


@triton.jit
def add_in_order(acc, partial, tickets, split, splits, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(sum over all splits, True) in the program that arrives last, (anything, False) in the others.

    Each program stores its part and takes a ticket; the one that draws the last ticket reads all parts in the order of
    the splits. Tiles are numbered by programs 0 and 1 of the grid.
    """
    last = True
    if splits > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        parts = partial + tile.to(tl.int64) * splits * (ROWS * COLUMNS)
        leave_part(acc, parts, split, ROWS, COLUMNS)
        last = arrives_last(tickets + tile, splits)
        if last:
            acc = sum_of_parts(parts, splits, ROWS, COLUMNS)
    return acc, last


@triton.jit
def store_tile(
    total,
    bias,
    y,
    row,
    token,
    tokens,
    outputs,
    y_stride,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """y[token, row] = total[row, token] + bias[row], rounded."""
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(
        y + token[None, :].to(tl.int64) * y_stride + row[:, None],
        to_half(total, DTYPE, INTERPRET),
        mask=(token < tokens)[None, :] & (row < outputs)[:, None],
    )
