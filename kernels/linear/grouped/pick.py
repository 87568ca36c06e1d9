"""Inside a kernel: from logits of some tokens to their experts, as a table of zeros and ones, [tokens, experts].

Sums along its rows give the slots of a token, sums along its columns places in the list of pairs (`routes.py`). Where
other ranks have some of the experts, those from FIRST to END are here: only their pairs are listed, and others count 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit.kernels.linear.weight_only.unpack import to_half

_LOWEST = tl.constexpr(-1e30)  # of a score: an expert of a closed group is taken after all others
_MOST_PAIRS = tl.constexpr(4096)  # more than any list here has, and than there are experts


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
def pick(
    logits,
    correction,
    weights,
    chosen,
    token,
    expert,
    tokens,
    experts,
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
):
    """(table, slots): 1 where a token chose an expert of this rank, and the slot that this is; writes numbers and
    weights of all.

    `logits` [tokens, experts] in float32.
    """
    inside = (expert < experts)[None, :]
    here = (token < tokens)[:, None]
    scores = _scores(_finite(logits), inside, SIGMOID)
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
    own = ((expert >= FIRST) & (expert < END))[None, :]
    tl.store(weights + place, to_half(tl.where(own, share * SCALE, 0.0), DTYPE, INTERPRET), mask=table > 0)
    tl.store(chosen + place, tl.broadcast_to(expert[None, :], table.shape), mask=table > 0)
    return tl.where(own, table, 0), slot


@triton.jit
def write_tiles(count, start, expert, tiles, most, FIRST: tl.constexpr, TILE: tl.constexpr):
    """Of experts that have pairs; a tile names the plane of a weight that holds its expert."""
    number = (count + (TILE - 1)) // TILE
    first = tl.cumsum(number, 0) - number
    for tile in range(tl.max(number, 0)):
        place = tiles + first + tile
        here = tile < number
        tl.store(place, expert - FIRST, mask=here)
        tl.store(place + most, start + tile * TILE, mask=here)
        tl.store(place + 2 * most, start + count, mask=here)
    for begin in range(tl.sum(number, 0), most, 128):
        place = begin + tl.arange(0, 128)
        tl.store(tiles + place, -1, mask=place < most)


@triton.jit
def list_all_pairs(
    table, slot, token, expert, order, tiles, most, PER_TOKEN: tl.constexpr, FIRST: tl.constexpr, TILE: tl.constexpr
):
    """Order and tiles, by a program that sees all tokens."""
    count = tl.sum(table, 0)
    start = tl.cumsum(count, 0) - count
    place = start[None, :] + tl.cumsum(table, 0) - 1
    tl.store(order + place, token[:, None] * PER_TOKEN + slot, mask=table > 0)
    write_tiles(count, start, expert, tiles, most, FIRST, TILE)


@triton.jit
def list_chosen(
    chosen,
    order,
    tiles,
    pairs,
    most,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The same from numbers that other programs have written: a pair's place is how many come before it."""
    BLOCK: tl.constexpr = min(PAIRS, 32)  # pairs that all are compared with at a time: more need too many registers
    pair, expert = tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    rank, own, _ = _ranks(chosen, pair, pairs, FIRST, END)
    place, count = tl.zeros((PAIRS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for begin in range(0, PAIRS, BLOCK):
        others, theirs, number = _ranks(chosen, begin + tl.arange(0, BLOCK), pairs, FIRST, END)
        place += tl.sum((others[None, :] < rank[:, None]).to(tl.int32), 1)
        count += tl.sum(((number[:, None] == expert[None, :]) & theirs[:, None]).to(tl.int32), 0)
    tl.store(order + place, pair, mask=own)
    write_tiles(count, tl.cumsum(count, 0) - count, expert, tiles, most, FIRST, TILE)


@triton.jit
def _ranks(chosen, pair, pairs, FIRST: tl.constexpr, END: tl.constexpr):
    """(by expert, then by pair; whether it is this rank's; its expert)."""
    number = tl.load(chosen + pair, mask=pair < pairs, other=-1, cache_modifier=".cg")
    own = (number >= FIRST) & (number < END)
    return tl.where(own, number * _MOST_PAIRS + pair, _MOST_PAIRS * _MOST_PAIRS), own, number
