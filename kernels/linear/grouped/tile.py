"""What routed matmuls share: which rows a tile reads and writes, how its programs meet, and the activation at its end.

A program computes a tile of outputs for a tile of pairs, as out^T = W x^T. Under GATED it has two accumulators, of gate
and of up, for the same channels; rows of x are those of tokens, and results lie in the order of `Routes.order`. Without
it rows of x lie in that order, and results are written where the pair's number says. Where pairs are not listed, both
lie under the numbers of their pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.activation import ACTIVATIONS, activated, clipped
from quantkit.kernels.chain import chained
from quantkit.kernels.checks import HALVES, check_dtype, check_rows, check_same_device, check_shape
from quantkit.kernels.linear.grouped.routes import Routes, can_stay_unlisted
from quantkit.kernels.linear.grouped.weight import Clip, GroupedWeight
from quantkit.kernels.linear.splits import MOST_TILES, arrives_last, leave_part, sum_of_parts
from quantkit.kernels.linear.weight import TICKETS
from quantkit.kernels.linear.weight_only.assembly import TRITON
from quantkit.kernels.linear.weight_only.unpack import to_half

NAME = "routed matmul"
CHANGING = ("most", "steps", "per_split", "splits")  # from call to call: not worth a compilation each


@dataclass(frozen=True)
class TileConfig:
    """How one product is cut; the pairs of a tile are the routes'.

    outputs   of a tile; under an activation so many channels of gate and as many of up
    splits    programs that share the inputs of a tile
    depth     inputs of a step, for weights of 16 bits; packed ones have 128
    copies    of the table of pairs (nf4, fp4, e2m1), as in `weight_only/skinny.py`
    streamed  weights are read once, and need not stay in a cache
    """

    outputs: int = 64
    warps: int = 4
    stages: int = 3
    splits: int = 1
    depth: int = 128
    copies: int = 0
    streamed: bool = True


@dataclass(frozen=True)
class Launch:
    """The grid (tiles of pairs, tiles of outputs, splits), the result, and what every routed kernel is given: arguments
    from the bias to `factor` in their order, and what it is compiled for."""

    grid: tuple[int, int, int]
    y: Tensor
    arguments: tuple[object, ...]
    constants: dict[str, Any]


def prepare_launch(
    x: Tensor,
    weight: GroupedWeight,
    routes: Routes,
    config: TileConfig,
    activation: str | None,
    clip: Clip | None,
    rows: int,
    steps: int,
) -> Launch:
    """Checks the arguments; `rows` are the padded outputs of a plane, `steps` its inputs in steps."""
    gated = activation is not None
    if gated and activation not in ACTIVATIONS:
        raise InputError(f"{NAME}: activation '{activation}', but must be one of {', '.join(ACTIVATIONS)}")
    wanted = routes.chosen.shape[0] if gated else routes.pairs
    check_shape(NAME, "x", x, (wanted, weight.inputs))
    check_dtype(NAME, "x", x, HALVES)
    check_rows(NAME, "x", x)
    check_same_device(NAME, x=x, weight=weight.device, order=routes.order)
    if weight.bias is not None:
        check_shape(NAME, "bias", weight.bias, (weight.count, weight.outputs))
        check_dtype(NAME, "bias", weight.bias, (x.dtype,))
    if rows % config.outputs:
        raise InputError(f"{NAME}: tiles of {config.outputs} outputs do not divide {rows} padded outputs")
    if wanted * x.stride(0) >= 1 << 31:
        raise InputError(f"{NAME}: {wanted} rows of {x.stride(0)} are too many for 32-bit places; use smaller steps")
    down = triton.cdiv(weight.outputs, config.outputs)
    per_split = triton.cdiv(steps, config.splits)
    splits = triton.cdiv(steps, per_split)
    if down > MOST_TILES or (splits > 1 and routes.most * down > TICKETS):
        raise InputError(f"{NAME}: {routes.most} x {down} tiles are too many to share their inputs {splits} ways")
    if routes.order is None and not can_stay_unlisted(len(routes.chosen), routes.per_token, routes.tile, splits):
        raise InputError(f"{NAME}: {routes.pairs} pairs in tiles of {routes.tile} and {splits} splits must be listed")
    room = routes.most * down * splits * config.outputs * routes.tile * (1 + gated) if splits > 1 else 0
    partial = torch.empty(room, dtype=torch.float32, device=x.device)
    y = torch.empty(routes.pairs, weight.outputs, dtype=x.dtype, device=x.device)
    most = routes.pairs if routes.order is None else routes.most
    sizes = (weight.outputs, weight.inputs, most, steps, per_split, splits, x.stride(0), y.stride(0))
    constants = {
        "GATED": gated,
        "GELU": activation == "gelu_pytorch_tanh",
        "CLIPPED": gated and clip is not None,
        "HAS_BIAS": weight.bias is not None,
        "PER_TOKEN": routes.per_token,
        "LISTED": routes.order is not None,
        "BY_PAIR": routes.pairs <= len(routes.own),
        "FIRST": routes.own.start,
        "END": routes.own.stop,
        "CHOICES": triton.next_power_of_2(routes.pairs) if routes.order is None else 0,
        "DTYPE": TRITON[x.dtype],
        "INTERPRET": triton.knobs.runtime.interpret,
        "OUTPUTS": config.outputs,
        "TOKENS": routes.tile,
        "num_warps": config.warps,
        "num_stages": config.stages,
        **chained(x.device),
    }
    listing = (routes.chosen if routes.order is None else routes.order, routes.tiles)
    arguments = (weight.bias, *listing, y, partial, weight.tickets, *sizes, *(clip or (0.0, 0.0)))
    return Launch((routes.most, down, splits), y, arguments, constants)


@triton.jit
def dot(weight, x, acc, INTERPRET: tl.constexpr):
    if INTERPRET:  # where products of bfloat16 are wrong
        return tl.dot(weight.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(weight, x, acc)


@triton.jit
def pairs_of_program(
    order,
    tiles,
    most,
    LISTED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """(plane, first place, end of the places where its tiles begin, ranks): a program without pairs has no tiles.

    LISTED: one tile of `tiles`, which has room for `most`; no ranks. Else `order` is `Routes.chosen`, which has `most`
    pairs, and ranks [CHOICES] count those of this program's expert from 1; others have 0.
    """
    program = tl.program_id(0)
    if LISTED:
        plane = tl.load(tiles + program)
        place = tl.load(tiles + most + program, mask=plane >= 0, other=0)
        return plane, place, tl.where(plane >= 0, place + 1, place), 0
    else:
        pair = tl.arange(0, CHOICES)
        experts = tl.load(order + pair, mask=pair < most, other=-1)
        expert = tl.load(order + program) if BY_PAIR else program + FIRST
        own = experts == expert
        ranks = tl.where(own, tl.cumsum(own.to(tl.int32), 0), 0)
        count = tl.max(ranks, 0)
        if BY_PAIR:
            leads = tl.min(tl.where(own, pair, CHOICES), 0) == program
            count = tl.where(leads & (expert >= FIRST) & (expert < END), count, 0)
        return expert - FIRST, 0, count, ranks


@triton.jit
def rows_of_tile(
    order,
    tiles,
    most,
    first,
    ranks,
    PER_TOKEN: tl.constexpr,
    GATED: tl.constexpr,
    LISTED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """(rows of x, rows of the result, which of them there are), [TOKENS] each, of the tile that begins at `first`."""
    place = first + tl.arange(0, TOKENS)
    if LISTED:
        here = place < tl.load(tiles + 2 * most + tl.program_id(0))
        pair = tl.load(order + place, mask=here, other=0)
    else:
        here = place < tl.max(ranks, 0)
        pair = tl.sum(tl.where(ranks[None, :] == place[:, None] + 1, tl.arange(0, CHOICES)[None, :], 0), 1)
        place = pair
    if GATED:
        return pair // PER_TOKEN, place, here
    else:
        return tl.where(here, place, 0), pair, here


@triton.jit
def finish_tile(
    acc,
    up,
    bias,
    partial,
    tickets,
    y,
    plane,
    row,
    target,
    here,
    outputs,
    split,
    splits,
    y_stride,
    limit,
    factor,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    CLIPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Adds what the splits have, in their order; the last one adds biases, rounds, activates and writes."""
    last = True
    if splits > 1:
        SIZE: tl.constexpr = OUTPUTS * TOKENS
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        parts = partial + tile.to(tl.int64) * splits * (2 * SIZE if GATED else SIZE)
        leave_part(acc, parts, split, OUTPUTS, TOKENS)
        if GATED:
            leave_part(up, parts + splits * SIZE, split, OUTPUTS, TOKENS)
        last = arrives_last(tickets + tile, splits)
        if last:
            acc = sum_of_parts(parts, splits, OUTPUTS, TOKENS)
            if GATED:
                up = sum_of_parts(parts + splits * SIZE, splits, OUTPUTS, TOKENS)
    if last:
        if HAS_BIAS:
            own = bias + plane * outputs + row
            acc += tl.load(own, mask=row < outputs, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(own + outputs, mask=row < outputs, other=0.0).to(tl.float32)[:, None]
        if GATED:
            gate = to_half(acc, DTYPE, INTERPRET).to(tl.float32)
            up = to_half(up, DTYPE, INTERPRET).to(tl.float32)
            if CLIPPED:
                acc = clipped(gate, up, limit, factor)
            else:
                acc = to_half(activated(gate, GELU), DTYPE, INTERPRET).to(tl.float32) * up
        tl.store(
            y + target[None, :].to(tl.int64) * y_stride + row[:, None],
            to_half(acc, DTYPE, INTERPRET),
            mask=here[None, :] & (row < outputs)[:, None],
        )
