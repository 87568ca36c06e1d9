"""A router's matmul and its choice, as one launch for few tokens; it lists their pairs where that is asked for.

Layout   x [tokens, inputs] bfloat16 or float16, rows contiguous; router [experts, inputs] of that dtype with tickets
         (`dense/weight.py`); correction as in `routing.py`
Meaning  `routing.route` of the logits x @ router.T, which are rounded to the dtype of x
Limits   up to 64 tokens and as many experts as `routing.py` takes; lists of up to 256 pairs

Programs share out experts, inputs and blocks of up to 8 tokens; each has a single tile of the router's weight, and
reads it before it waits for the launch before. The last one to arrive at a block adds its parts in order and chooses;
the last of these lists the pairs of all blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.checks import HALVES, check_dtype, check_rows, check_same_device, check_shape
from quantkit.kernels.linear.dense.weight import HalfWeight
from quantkit.kernels.linear.grouped.pick import list_chosen, pick
from quantkit.kernels.linear.grouped.routes import Routes, Rule
from quantkit.kernels.linear.grouped.routing import check_rule, constants, empty_routes
from quantkit.kernels.linear.grouped.tile import dot
from quantkit.kernels.linear.splits import arrives_last
from quantkit.kernels.linear.weight_only.assembly import TRITON
from quantkit.kernels.linear.weight_only.unpack import to_half

NAME = "router"
MOST_TOKENS = 64
MOST_LISTED = 256  # pairs that one program compares with each other
_BLOCK = 16  # experts of a program
_TOKENS = 8  # of a program, at most
_SHARES = 8  # of the inputs


@triton.jit(do_not_specialize=("tokens", "most"))
def _router(
    x,
    router,
    correction,
    weights,
    chosen,
    order,
    tiles,
    partial,
    tickets,
    tokens,
    experts,
    inputs,
    x_stride,
    most,
    HAS_CORRECTION: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    SCALE: tl.constexpr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    SHARES: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """PAIRS: room for all of them in a list; 0: none is made."""
    COLUMNS: tl.constexpr = 8  # of a product
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    first = tl.program_id(2) * TOKENS
    inside = column < inputs
    share = tl.load(router + own[:, None] * inputs + column[None, :],
                    mask=(own < experts)[:, None] & inside[None, :], other=0.0)  # fmt: skip
    wait_for_last(CHAINED)
    row = tl.arange(0, COLUMNS)
    value = tl.load(x + (first + row)[None, :] * x_stride + column[:, None],
                    mask=(row < TOKENS)[None, :] & (first + row < tokens)[None, :] & inside[:, None],
                    other=0.0)  # fmt: skip
    part = dot(share, value, tl.zeros((BLOCK, COLUMNS), tl.float32), INTERPRET)
    parts = partial + first * SHARES * EXPERTS
    place = (tl.program_id(1) * TOKENS + row[None, :]) * EXPERTS + own[:, None]
    tl.store(parts + place, part, mask=(row < TOKENS)[None, :] & (own < EXPERTS)[:, None])
    if arrives_last(tickets + tl.program_id(2), tl.num_programs(0) * tl.num_programs(1)):
        token, expert = tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
        logits = tl.zeros((TOKENS, EXPERTS), tl.float32)
        for number in tl.static_range(SHARES):
            at = (number * TOKENS + token[:, None]) * EXPERTS + expert[None, :]
            logits += tl.load(parts + at, cache_modifier=".cg")
        pick(to_half(logits, DTYPE, INTERPRET).to(tl.float32), correction, weights, chosen, first + token, expert,
             tokens, experts, HAS_CORRECTION, PER_TOKEN, NORMALIZED, SIGMOID, GROUPS, GROUPS_CHOSEN, SCALE, FIRST, END,
             DTYPE, INTERPRET)  # fmt: skip
        if PAIRS > 0:  # noqa: SIM102  (the second asks a tensor)
            if arrives_last(tickets + tl.num_programs(2), tl.num_programs(2)):
                list_chosen(chosen, order, tiles, tokens * PER_TOKEN, most, FIRST, END, PAIRS, EXPERTS, TILE)


def route_tokens(
    x: Tensor,
    router: HalfWeight,
    rule: Rule,
    tile: int,
    correction: Tensor | None = None,
    own: range | None = None,
    *,
    listed: bool = False,
) -> Routes:
    """What every token's experts are, in tiles of up to `tile` pairs; `own` as in `routing.route`."""
    check_shape(NAME, "x", x, (None, router.inputs))
    check_dtype(NAME, "x", x, HALVES)
    check_dtype(NAME, "router", router.values, (x.dtype,))
    check_rows(NAME, "x", x)
    check_same_device(NAME, x=x, router=router.device)
    tokens, experts = x.shape[0], router.outputs
    own = range(experts) if own is None else own
    check_rule(rule, experts, x.device, correction, own)
    if tokens > MOST_TOKENS:
        raise InputError(f"{NAME}: {tokens} tokens, but at most {MOST_TOKENS} are routed in one launch")
    if listed and tokens * rule.per_token > MOST_LISTED:
        raise InputError(f"{NAME}: {tokens * rule.per_token} pairs, but at most {MOST_LISTED} are listed in one launch")
    routes = empty_routes(tokens, own, rule.per_token, tile, x.dtype, x.device)
    if not listed:
        routes = routes.unlisted
    if tokens == 0:
        return routes
    rows, columns = min(_TOKENS, triton.next_power_of_2(tokens)), triton.next_power_of_2(experts)
    blocks = triton.cdiv(tokens, rows)
    depth = max(128, triton.next_power_of_2(triton.cdiv(router.inputs, _SHARES)))
    shares = triton.cdiv(router.inputs, depth)
    partial = torch.empty(blocks * shares * rows * columns, dtype=torch.float32, device=x.device)
    _router[(triton.cdiv(columns, _BLOCK), shares, blocks)](
        x,
        router.values,
        correction,
        routes.weights,
        routes.chosen,
        routes.order,
        routes.tiles,
        partial,
        router.tickets,
        tokens,
        experts,
        router.inputs,
        x.stride(0),
        routes.most,
        HAS_CORRECTION=correction is not None,
        **constants(rule, own),
        DTYPE=TRITON[x.dtype],
        INTERPRET=triton.knobs.runtime.interpret,
        TOKENS=rows,
        EXPERTS=columns,
        BLOCK=_BLOCK,
        DEPTH=depth,
        SHARES=shares,
        PAIRS=triton.next_power_of_2(routes.pairs) if listed else 0,
        TILE=tile,
        num_warps=min(16, max(2 if rows <= 2 else 4, rows * columns // 256)),  # the table is held in registers
        **chained(x.device),
    )
    return routes
