"""From a router's logits to `Routes`, on the device alone: nothing is sorted, and the host learns nothing.

Layout   logits [tokens, experts] bfloat16, float16 or float32, rows contiguous; correction float32 [experts] or None
Meaning  `reference.experts.choose_experts`, and the order that `routes.py` describes
Limits   up to 1,024 experts; chosen groups must have at least `per_token` experts

Few tokens are one program, which writes everything (`pick.py`). More of them are three launches: `_choose` counts for
each block of tokens, `_scan` adds the counts up, `_place` writes the order. Few pairs need no list: `router.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.checks import HALVES, check_dtype, check_rows, check_same_device, check_shape
from quantkit.kernels.linear.grouped.pick import list_all_pairs, pick, write_tiles
from quantkit.kernels.linear.grouped.routes import Routes, Rule, most_tiles
from quantkit.kernels.linear.weight_only.assembly import TRITON

NAME = "routing"
MOST_EXPERTS = 1024
_ONE_PROGRAM = 4096  # numbers of a table that one program still takes alone: 32 tokens of 128 experts
_BLOCK = 4096  # numbers of a table of each program, where there are several
_SCANNED = 8192  # counts that `_scan` holds at a time


@triton.jit(do_not_specialize=("tokens", "most"))
def _choose(
    logits,
    correction,
    weights,
    chosen,
    counts,
    order,
    tiles,
    tokens,
    experts,
    stride,
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
    TILE: tl.constexpr,
    ALONE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One block of tokens; ALONE: all of them, and everything is written."""
    wait_for_last(CHAINED)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    here = (token < tokens)[:, None] & (expert < experts)[None, :]
    value = tl.load(logits + token.to(tl.int64)[:, None] * stride + expert[None, :], mask=here, other=0.0)
    table, slot = pick(value.to(tl.float32), correction, weights, chosen, token, expert, tokens, experts,
                       HAS_CORRECTION, PER_TOKEN, NORMALIZED, SIGMOID, GROUPS, GROUPS_CHOSEN, SCALE, FIRST, END, DTYPE,
                       INTERPRET)  # fmt: skip
    if ALONE:
        list_all_pairs(table, slot, token, expert, order, tiles, most, PER_TOKEN, FIRST, TILE)
    else:
        tl.store(counts + tl.program_id(0) * EXPERTS + expert, tl.sum(table, 0))


@triton.jit(do_not_specialize=("blocks", "most"))
def _scan(
    counts,
    starts,
    tiles,
    blocks,
    most,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    FIRST: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """counts [blocks, EXPERTS] become sums over the blocks before, starts [EXPERTS] where an expert's pairs begin."""
    wait_for_last(CHAINED)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        place = counts + block[:, None] * EXPERTS + expert[None, :]
        here = (block < blocks)[:, None]
        count = tl.load(place, mask=here, other=0)
        tl.store(place, total[None, :] + tl.cumsum(count, 0) - count, mask=here)
        total += tl.sum(count, 0)
    start = tl.cumsum(total, 0) - total
    tl.store(starts + expert, start)
    write_tiles(total, start, expert, tiles, most, FIRST, TILE)


@triton.jit(do_not_specialize=("tokens",))
def _place(
    chosen,
    counts,
    starts,
    order,
    tokens,
    PER_TOKEN: tl.constexpr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_last(CHAINED)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    slots = tl.zeros((TOKENS, EXPERTS), tl.int32)  # counted from 1; 0: not chosen
    for slot in tl.static_range(PER_TOKEN):
        number = tl.load(chosen + token * PER_TOKEN + slot, mask=token < tokens, other=-1)
        slots = tl.where(number[:, None] == expert[None, :], slot + 1, slots)
    own = ((expert >= FIRST) & (expert < END))[None, :]
    table = ((slots > 0) & own).to(tl.int32)
    start = tl.load(starts + expert) + tl.load(counts + tl.program_id(0) * EXPERTS + expert)
    place = start[None, :] + tl.cumsum(table, 0) - 1
    tl.store(order + place, token[:, None] * PER_TOKEN + slots - 1, mask=table > 0)


def route(logits: Tensor, rule: Rule, tile: int, correction: Tensor | None = None, own: range | None = None) -> Routes:
    """What every token's experts are, in tiles of up to `tile` pairs.

    `own`: the experts of this rank, neighbours. The pairs of others are in no tile, and count 0.
    """
    check_shape(NAME, "logits", logits, (None, None))
    check_dtype(NAME, "logits", logits, (*HALVES, torch.float32))
    check_rows(NAME, "logits", logits)
    (tokens, experts), device = logits.shape, logits.device
    own = range(experts) if own is None else own
    check_rule(rule, experts, device, correction, own)
    columns = triton.next_power_of_2(experts)
    routes = empty_routes(tokens, own, rule.per_token, tile, logits.dtype, device)
    if tokens == 0:
        return routes
    alone = triton.next_power_of_2(tokens) * columns <= _ONE_PROGRAM
    rows = triton.next_power_of_2(tokens) if alone else max(1, _BLOCK // columns)
    blocks = triton.cdiv(tokens, rows)
    counts = torch.empty(0 if alone else (blocks + 1) * columns, dtype=torch.int32, device=device)
    warps = min(16, max(1, rows * columns // 256))
    _choose[(blocks,)](
        logits,
        correction,
        routes.weights,
        routes.chosen,
        counts,
        routes.order,
        routes.tiles,
        tokens,
        experts,
        logits.stride(0),
        routes.most,
        HAS_CORRECTION=correction is not None,
        **constants(rule, own),
        DTYPE=TRITON.get(logits.dtype, tl.float32),
        INTERPRET=triton.knobs.runtime.interpret,
        TOKENS=rows,
        EXPERTS=columns,
        TILE=tile,
        ALONE=alone,
        num_warps=warps,
        **chained(device),
    )
    if not alone:
        starts, sizes = counts[blocks * columns :], {"EXPERTS": columns, "num_warps": 8}
        scanned = max(1, _SCANNED // columns)
        _scan[(1,)](counts, starts, routes.tiles, blocks, routes.most, BLOCKS=scanned, FIRST=own.start, TILE=tile,
                    **sizes, **chained(device))  # fmt: skip
        _place[(blocks,)](routes.chosen, counts, starts, routes.order, tokens, PER_TOKEN=rule.per_token,
                          FIRST=own.start, END=own.stop, TOKENS=rows, **sizes, **chained(device))  # fmt: skip
    return routes


def empty_routes(
    tokens: int, own: range, per_token: int, tile: int, dtype: torch.dtype, device: torch.device
) -> Routes:
    """With a place for a list."""
    pairs = tokens * per_token
    made = torch.empty(2 * pairs, dtype=torch.int32, device=device)
    return Routes(
        chosen=made[:pairs].view(tokens, per_token),
        weights=torch.empty(tokens, per_token, dtype=dtype, device=device),
        own=own,
        tile=tile,
        order=made[pairs:],
        tiles=torch.empty(3, most_tiles(pairs, len(own), tile), dtype=torch.int32, device=device),
    )


def constants(rule: Rule, own: range) -> dict[str, object]:
    """What `pick` is compiled for."""
    return {
        "PER_TOKEN": rule.per_token,
        "NORMALIZED": rule.normalized,
        "SIGMOID": rule.scoring == "sigmoid",
        "GROUPS": rule.groups,
        "GROUPS_CHOSEN": rule.groups_chosen,
        "SCALE": float(rule.scale),
        "FIRST": own.start,
        "END": own.stop,
    }


def check_rule(rule: Rule, experts: int, device: torch.device, correction: Tensor | None, own: range) -> None:
    check_same_device(NAME, logits=device, correction=correction)
    if correction is not None:
        check_shape(NAME, "correction", correction, (experts,))
        check_dtype(NAME, "correction", correction, (torch.float32,))
    if rule.scoring not in ("softmax", "sigmoid"):
        raise InputError(f"{NAME}: scoring is '{rule.scoring}', but must be softmax or sigmoid")
    if experts > MOST_EXPERTS:
        raise InputError(f"{NAME}: {experts} experts, but at most {MOST_EXPERTS} can be")
    if not 1 <= rule.per_token <= experts:
        raise InputError(f"{NAME}: {rule.per_token} experts of a token, but there are {experts}")
    if not 0 <= own.start < own.stop <= experts or own.step != 1:
        raise InputError(f"{NAME}: experts {own.start} to {own.stop} are asked for, but there are {experts}")
    if rule.groups < 1 or experts % rule.groups or not 1 <= rule.groups_chosen <= rule.groups:
        raise InputError(f"{NAME}: {rule.groups_chosen} of {rule.groups} groups, which do not divide {experts} experts")
    size = experts // rule.groups
    if rule.groups_chosen * size < rule.per_token:
        raise InputError(
            f"{NAME}: {rule.groups_chosen} groups of {size} experts are fewer than the {rule.per_token} of a token"
        )
