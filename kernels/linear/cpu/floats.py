"""Linear layers on a CPU in float32, from packed codes or float8.

Many tokens are multiplied by panels (`kernels/cpu/panel_product.py`), few with codes that become floats in registers
where vectors have 64 bytes (`kernels/cpu/tile_product.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.formats.base import InputRounding
from quantkit.kernels.cpu import installed
from quantkit.kernels.linear.cpu.slabs import Rows
from quantkit.kernels.linear.cpu.tiled import TILE_ROWS, Tiles

_PIECES = 8  # of a product for each thread


class FloatPlan(NamedTuple):
    """What a product with some number of tokens always has: arguments of its kernel, and sizes."""

    kernel: int
    weight: tuple[int, ...]  # its first arguments
    sizes: tuple[int, ...]  # its last but two
    inputs: int
    pieces: int


def pays(held: Tiles | Rows, tokens: int, digits: int) -> bool:
    """Whether it takes less than whole numbers do, or than slabs: measured on AVX-512 with and without float32 x."""
    if not installed.can_compile():
        return False
    if isinstance(held, Rows):
        from quantkit.kernels.cpu.float8 import QUADS

        return held.float8 and held.codes.shape[1] % QUADS == 0
    return held.float8 or tokens >= _fewest(held, digits)


def _fewest(tiles: Tiles, digits: int) -> float:
    from quantkit.kernels.cpu.processor import this_processor

    processor = this_processor()
    late = processor.dot == "pmaddubsw" and tiles.meaning.dot_bits == 8  # bytes of 8 bits have no instruction
    if late and processor.vector == 64 and (tiles.meaning.digits or digits > 1):
        return 2 if digits == 2 and not tiles.meaning.digits else 1
    if digits == 3:
        return 2 if tiles.meaning.digits else 3
    if processor.dot == "wide" or late:
        return 8
    return 128 if processor.dot == "pmaddubsw" and tiles.block <= 32 else math.inf


def multiply(
    x: Tensor, held: Tiles | Rows, bias: Tensor | None, y: Tensor, *, rounding: InputRounding | None = None
) -> None:
    """y = x @ weight.T + bias, rows of x and y contiguous; x is rounded as the format of tiles says."""
    from quantkit.kernels.cpu.pool import shared_pool
    from quantkit.kernels.cpu.token_rounding import rounded_floats
    from quantkit.kernels.cpu.widening import widened

    pool, (tokens, outputs) = shared_pool(), y.shape
    asked = (tokens, outputs, y.dtype, pool.threads)
    plan = held.float_plans.get(asked)
    if plan is None:
        plan = held.float_plans[asked] = _new_plan(held, *asked)
    if rounding is None:
        x = widened(x, plan.inputs)
    else:
        x = rounded_floats(pool, x, rounding.outlier_threshold, plan.inputs)
    own = [x.data_ptr(), 0, 0, 0, 0 if bias is None else bias.data_ptr(), y.data_ptr(), tokens]
    pool.run(plan.kernel, [*plan.weight, *own, *plan.sizes, y.stride(0), 0], plan.pieces)


def _new_plan(held: Tiles | Rows, tokens: int, outputs: int, dtype: torch.dtype, threads: int) -> FloatPlan:
    from quantkit.kernels.cpu import panel_product, tile_product
    from quantkit.kernels.cpu.processor import this_processor
    from quantkit.kernels.cpu.product_kind import Kind

    count, groups = -(-outputs // TILE_ROWS), held.scales.shape[1]
    if isinstance(held, Rows):
        codes, inputs, blocks = None, held.codes.shape[1], 1
        scales, zeros, *more = held.scales.data_ptr(), 0, 0, 0, 0
    else:
        lows = None if held.lows is None else held.lows.dtype
        codes = Kind(held.meaning, held.block, 3, 1, torch.float32, held.scales.dtype, held.every, lows)
        inputs, blocks = groups * held.group, held.group // held.block
        scales, zeros, *more = (0 if part is None else part.data_ptr() for part in held.numbers.values())
    if codes and tile_product.takes(this_processor(), tokens):
        tiles, kernel = 1, tile_product.kernel(tile_product.kind_for(codes, dtype, tokens))
    else:
        tiles, together = panel_product.shape_for(this_processor(), tokens)
        kernel = panel_product.kernel(panel_product.PanelKind(codes, dtype, tiles, together))
    each = max(1, count // (_PIECES * threads * tiles)) * tiles
    return FloatPlan(
        kernel=kernel,
        weight=(held.codes.data_ptr(), scales, zeros),
        sizes=(outputs, inputs, groups, blocks, each, *more),
        inputs=inputs,
        pieces=-(-count // each),
    )
