"""From a router's logits to `Routes`, on the device alone: nothing is sorted, and the host learns nothing.

Layout   logits [tokens, experts] bfloat16, float16 or float32, rows contiguous; correction float32 [experts] or None
Meaning  `reference.experts.choose_experts`, and the order that `routes.py` describes
Limits   up to 1,024 experts; chosen groups must have at least `per_token` experts

A program looks at some tokens as a table of zeros and ones, [tokens, experts]: sums along its rows give slots, sums
along its columns give places. Few tokens are one program, which writes everything. More of them are three launches:
`_choose` counts for each block of tokens, `_scan` adds the counts up, `_place` writes the order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.chain import chained, wait_for_last
from quantkit.kernels.checks import HALVES, check_dtype, check_rows, check_same_device, check_shape
from quantkit.kernels.linear.grouped.routes import Routes, Rule, most_tiles
from quantkit.kernels.linear.weight_only.assembly import TRITON
from quantkit.kernels.linear.weight_only.unpack import to_half

NAME = "routing"
MOST_EXPERTS = 1024
_ONE_PROGRAM = 4096  # numbers of a table that one program still takes alone: 32 tokens of 128 experts
_BLOCK = 4096  # numbers of a table of each program, where there are several
_SCANNED = 8192  # counts that `_scan` holds at a time
_LOWEST = tl.constexpr(-1e30)  # of a score: an expert of a closed group is taken after all others


@triton.jit
def _finite(value):
    """Also of NaN: whatever a token is, it chooses just as many experts as others."""
    return tl.minimum(tl.where(value > _LOWEST, value, _LOWEST), -_LOWEST)


@triton.jit
def _scores(logits, inside, SIGMOID: tl.constexpr):
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logits))
    else:
        logits = tl.where(inside, logits, float("-inf"))
        powers = tl.exp(logits - tl.max(logits, 1)[:, None])
        return powers / tl.sum(powers, 1)[:, None]


@triton.jit
def _in_open_groups(scores, expert, experts, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, GROUPS_CHOSEN: tl.constexpr):
    """Scores, lowered where a group is not among the best of its token."""
    COLUMNS: tl.constexpr = triton.next_power_of_2(GROUPS)
    group = expert // (experts // GROUPS)
    column = tl.arange(0, COLUMNS)[None, :]
    best = tl.full((scores.shape[0], COLUMNS), float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        own = tl.where((group == number)[None, :], scores, _LOWEST)
        value, at = tl.max(own, 1, return_indices=True)
        if SIGMOID:
            value += tl.max(tl.where(expert[None, :] == at[:, None], _LOWEST, own), 1)
        best = tl.where(column == number, value[:, None], best)
    open_ = tl.zeros(scores.shape, tl.int32)
    for _ in tl.static_range(GROUPS_CHOSEN):
        at = tl.argmax(best, 1)
        open_ += (group[None, :] == at[:, None]).to(tl.int32)
        best = tl.where(column == at[:, None], float("-inf"), best)
    return tl.where(open_ > 0, scores, _LOWEST)


@triton.jit
def _pick(
    logits,
    correction,
    weights,
    chosen,
    token,
    expert,
    tokens,
    experts,
    stride,
    HAS_CORRECTION: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """(table, slots): 1 where a token chose an expert, and the slot that this is; writes numbers and weights."""
    inside = (expert < experts)[None, :]
    here = (token < tokens)[:, None]
    value = tl.load(logits + token.to(tl.int64)[:, None] * stride + expert[None, :], mask=here & inside, other=0.0)
    scores = _scores(_finite(value.to(tl.float32)), inside, SIGMOID)
    preferred = scores
    if HAS_CORRECTION:
        preferred += tl.load(correction + expert, mask=expert < experts, other=0.0)[None, :]
        preferred = _finite(preferred)
    if GROUPS > 1:
        preferred = _in_open_groups(preferred, expert, experts, SIGMOID, GROUPS, GROUPS_CHOSEN)
    preferred = tl.where(inside, preferred, float("-inf"))
    table = tl.zeros(preferred.shape, tl.int32)
    for _ in tl.static_range(PER_TOKEN):
        taken = expert[None, :] == tl.argmax(preferred, 1)[:, None]
        table += taken.to(tl.int32)
        preferred = tl.where(taken, float("-inf"), preferred)
    table = tl.where(here, table, 0)
    share = tl.where(table > 0, scores, 0.0)
    if NORMALIZED:
        share = share / tl.maximum(tl.sum(share, 1), 1e-20)[:, None]
    slot = tl.cumsum(table, 1) - 1
    place = token.to(tl.int64)[:, None] * PER_TOKEN + slot
    tl.store(weights + place, to_half(share * SCALE, DTYPE, INTERPRET), mask=table > 0)
    tl.store(chosen + place, tl.broadcast_to(expert[None, :], table.shape), mask=table > 0)
    return table, slot


@triton.jit
def _write_tiles(count, start, expert, tiles, most, TILE: tl.constexpr):
    number = (count + (TILE - 1)) // TILE
    first = tl.cumsum(number, 0) - number
    for tile in range(tl.max(number, 0)):
        place = tiles + first + tile
        here = tile < number
        tl.store(place, expert, mask=here)
        tl.store(place + most, start + tile * TILE, mask=here)
        tl.store(place + 2 * most, start + count, mask=here)
    for begin in range(tl.sum(number, 0), most, 128):
        place = begin + tl.arange(0, 128)
        tl.store(tiles + place, -1, mask=place < most)


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
    table, slot = _pick(logits, correction, weights, chosen, token, expert, tokens, experts, stride, HAS_CORRECTION,
                        PER_TOKEN, NORMALIZED, SIGMOID, GROUPS, GROUPS_CHOSEN, SCALE, DTYPE, INTERPRET)  # fmt: skip
    count = tl.sum(table, 0)
    if ALONE:
        start = tl.cumsum(count, 0) - count
        place = start[None, :] + tl.cumsum(table, 0) - 1
        tl.store(order + place, token[:, None] * PER_TOKEN + slot, mask=table > 0)
        _write_tiles(count, start, expert, tiles, most, TILE)
    else:
        tl.store(counts + tl.program_id(0) * EXPERTS + expert, count)


@triton.jit(do_not_specialize=("blocks", "most"))
def _scan(
    counts,
    starts,
    tiles,
    blocks,
    most,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
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
    _write_tiles(total, start, expert, tiles, most, TILE)


@triton.jit(do_not_specialize=("tokens",))
def _place(
    chosen,
    counts,
    starts,
    order,
    tokens,
    PER_TOKEN: tl.constexpr,
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
    table = (slots > 0).to(tl.int32)
    start = tl.load(starts + expert) + tl.load(counts + tl.program_id(0) * EXPERTS + expert)
    place = start[None, :] + tl.cumsum(table, 0) - 1
    tl.store(order + place, token[:, None] * PER_TOKEN + slots - 1, mask=table > 0)


def route(logits: Tensor, rule: Rule, tile: int, correction: Tensor | None = None) -> Routes:
    """What every token's experts are, in tiles of up to `tile` pairs."""
    _check(logits, rule, correction)
    (tokens, experts), device = logits.shape, logits.device
    pairs, columns = tokens * rule.per_token, triton.next_power_of_2(experts)
    made = torch.empty(2 * pairs, dtype=torch.int32, device=device)
    routes = Routes(
        chosen=made[:pairs].view(tokens, rule.per_token),
        weights=torch.empty(tokens, rule.per_token, dtype=logits.dtype, device=device),
        order=made[pairs:],
        tiles=torch.empty(3, most_tiles(pairs, experts, tile), dtype=torch.int32, device=device),
        tile=tile,
    )
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
        **_constants(rule),
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
        _scan[(1,)](counts, starts, routes.tiles, blocks, routes.most, BLOCKS=scanned, TILE=tile, **sizes,
                    **chained(device))  # fmt: skip
        _place[(blocks,)](routes.chosen, counts, starts, routes.order, tokens, PER_TOKEN=rule.per_token, TOKENS=rows,
                          **sizes, **chained(device))  # fmt: skip
    return routes


def _constants(rule: Rule) -> dict[str, object]:
    return {
        "PER_TOKEN": rule.per_token,
        "NORMALIZED": rule.normalized,
        "SIGMOID": rule.scoring == "sigmoid",
        "GROUPS": rule.groups,
        "GROUPS_CHOSEN": rule.groups_chosen,
        "SCALE": float(rule.scale),
    }


def _check(logits: Tensor, rule: Rule, correction: Tensor | None) -> None:
    check_shape(NAME, "logits", logits, (None, None))
    check_dtype(NAME, "logits", logits, (*HALVES, torch.float32))
    check_rows(NAME, "logits", logits)
    check_same_device(NAME, logits=logits, correction=correction)
    experts = logits.shape[1]
    if correction is not None:
        check_shape(NAME, "correction", correction, (experts,))
        check_dtype(NAME, "correction", correction, (torch.float32,))
    if rule.scoring not in ("softmax", "sigmoid"):
        raise InputError(f"{NAME}: scoring is '{rule.scoring}', but must be softmax or sigmoid")
    if experts > MOST_EXPERTS:
        raise InputError(f"{NAME}: {experts} experts, but at most {MOST_EXPERTS} can be")
    if not 1 <= rule.per_token <= experts:
        raise InputError(f"{NAME}: {rule.per_token} experts of a token, but there are {experts}")
    if rule.groups < 1 or experts % rule.groups or not 1 <= rule.groups_chosen <= rule.groups:
        raise InputError(f"{NAME}: {rule.groups_chosen} of {rule.groups} groups, which do not divide {experts} experts")
    size = experts // rule.groups
    if rule.groups_chosen * size < rule.per_token:
        raise InputError(
            f"{NAME}: {rule.groups_chosen} groups of {size} experts are fewer than the {rule.per_token} of a token"
        )
