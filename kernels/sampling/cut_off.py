"""Where top-k and top-p cut a row off: a distance, and how many of the tokens at it stay. Exact, without sorting.

    survey    Every program adds up its part of the row below each of 16 distances: tokens where top-k is looked for,
              else their shares of probability in float32. These sums are right to far less than `_SLACK`.
    collect   So the cut-off is in a window between two of the distances, for certain. Its tokens' distances go into one
              list per row, the parts in any order; what is before the window is added up exactly, as integers. For
              top-k the window starts at the most probable token: top-p, which may follow, needs all of them.
    settle    One program per row narrows the window to an eighth, over and over, reading only the list, until one
              distance is left.

The list is as long as it must be: tens to hundreds of tokens where a model's distribution is peaked, some 12,000 of
128,256 where all of them are close. Rows that nothing cuts leave each launch at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.sampling import weights
from quantkit.kernels.sampling.weights import LIMIT, STEPS, distance_of, gap_of, halves_of, joined, share_of, weight_of

_TILE = 1024  # tokens in registers at a time
_EDGES = 16  # distances of the survey: 15 equally far apart (see `_plan`), and the largest one
_BUCKETS = 8  # that settling divides the window into
_SLACK = tl.constexpr(1.0 / 4096)  # float32 sums of 524,288 shares, added as a tree, are right to 1e-5

# State of a row, int64 [FIELDS]; rows of 64 bytes stay aligned.
FIELDS = tl.constexpr(8)
AIM = tl.constexpr(0)  # what is looked for
_WIDTH = tl.constexpr(1)  # between the distances of the survey
_LOW = tl.constexpr(2)  # the window: [low, high)
_HIGH = tl.constexpr(3)
_LISTED = tl.constexpr(4)  # how many tokens are in the list
CUT = tl.constexpr(5)  # tokens from this distance on are dropped,
SPARE = tl.constexpr(6)  # but for so many at this distance, the first ones by index

# Aims. MASS after COUNT starts when everything below the top-k cut-off has been weighed once.
_COUNT = tl.constexpr(0)
_WHOLE = tl.constexpr(1)
MASS = tl.constexpr(2)
NONE = tl.constexpr(3)


@dataclass(frozen=True)
class CutOffs:
    """What the search leaves, for every row."""

    state: Tensor  # int64 [requests, FIELDS]; of use to others are AIM, CUT and SPARE
    ahead: Tensor  # int64 [requests, parts], where AIM is MASS: weight of each part's tokens before the list's
    segments: Tensor  # int32 [requests, parts, 2]: where each part's tokens start in the list, and how many they are
    listed: Tensor  # int32 [requests, parts * PART]: distances. All tokens before the cut-off are in it, but for those
    # `ahead`. Rows are whole parts, so that they begin at multiples of 16 bytes: where they began anywhere, at 50,257
    # tokens, `_settle` spilled 184 to 216 bytes a thread when compiled for sm_86, 89, 100 and 120


@triton.jit
def _plan(top_k, top_p, temperature, largest, logsum, vocab):
    """What to look for, and how far apart the distances of the survey are: by multiples of 128, exact in float32.

    Tokens from a distance d on have vocab * exp(-d) of mass at most. Where that is less than what top-p drops, the
    cut-off is nearer. The mass at another temperature than 1 is bounded by the inequality of power means."""
    crowd = tl.log(temperature * 0.0 + vocab)
    mass = logsum - largest
    cold = 1.0 / tl.maximum(temperature, 1e-6)
    mass = tl.where(cold <= 1.0, mass, tl.maximum(cold * mass - (cold - 1.0) * crowd, 0.0))
    counts = (top_k > 0) & (top_k < vocab)
    reach = crowd - mass - tl.log(tl.maximum(1.0 - top_p, 1e-9))
    reach = tl.where(counts, 28.0, tl.minimum(tl.maximum(reach, 0.01), 28.0))
    aim = tl.where(counts, _COUNT, tl.where(top_p < 1.0, MASS, NONE))
    drawn = (temperature > 0.0) & (logsum == logsum)  # from logits that are finite: the search would not end
    return tl.where(drawn, aim, NONE), ((reach * (STEPS / 15)).to(tl.int32) // 128 + 1) * 128


@triton.jit
def _survey(
    logits, tops, logsums, temperature, top_k, top_p, state, sums, stride, vocab, splits,
    PART: tl.constexpr, TILE: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    top, heat = tl.load(tops + request), tl.load(temperature + request)
    count, nucleus, logsum = tl.load(top_k + request), tl.load(top_p + request), tl.load(logsums + request)
    aim, width = _plan(count, nucleus, heat, top, logsum, vocab)
    if split == 0:
        row = state + request * FIELDS
        tl.store(row + AIM, aim.to(tl.int64))
        tl.store(row + _WIDTH, width.to(tl.int64))
        tl.store(row + _LISTED, request * 0)
        tl.store(row + CUT, request * 0 + LIMIT)
        tl.store(row + SPARE, request * 0)
    if aim != NONE:
        edge = tl.arange(0, EDGES)
        found = tl.zeros((EDGES,), dtype=tl.float32)
        for first in range(split * PART, tl.minimum(split * PART + PART, vocab), TILE):
            token = first + tl.arange(0, TILE)
            x = tl.load(logits + request * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            gap = gap_of(x, top, heat)
            share = tl.where(aim == _COUNT, 1.0, share_of(gap))  # of the most probable token's
            for i in tl.static_range(EDGES):
                end = LIMIT if i == EDGES - 1 else tl.minimum((i + 1) * width, LIMIT)
                # A product with 0 or 1 is an instruction less than a choice between the share and 0.
                below = tl.where(gap < end * 1.0, 1.0, 0.0)
                found += tl.where(edge == i, tl.sum(below * share, axis=0), 0.0)
        tl.store(sums + (request * splits + split) * EDGES + edge, found)


@triton.jit
def _window(sums, request, splits, width, aim, top_k, top_p, SPLITS: tl.constexpr, EDGES: tl.constexpr):
    """Two distances of the survey with the cut-off between them: [low, high)."""
    split = tl.arange(0, SPLITS)[:, None]
    edge = tl.arange(0, EDGES)
    part = tl.load(sums + (request * splits + split) * EDGES + edge[None, :], mask=split < splits, other=0.0)
    upto = tl.sum(part, axis=0)
    end = tl.where(edge == EDGES - 1, LIMIT, tl.minimum((edge + 1) * width, LIMIT))
    counts = aim == _COUNT
    target = tl.where(counts, top_k.to(tl.float32), top_p * tl.max(upto, axis=0))
    slack = tl.where(counts, 0.0, target * _SLACK)
    low = tl.max(tl.where(upto < target - slack, end, 0), axis=0)
    high = tl.min(tl.where(upto >= target + slack, end, LIMIT), axis=0)
    return tl.where(counts, 0, low), high


@triton.jit
def _collect(
    logits, tops, temperature, top_k, top_p, state, sums, whole, ahead, segments, listed, stride, vocab, splits,
    PART: tl.constexpr, SPLITS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = state + request * FIELDS
    aim = tl.load(row + AIM)
    if aim != NONE:
        token = split * PART + tl.arange(0, PART)
        # On its way while the window is found.
        x = tl.load(logits + request * stride + token, mask=token < vocab, other=float("-inf"))
        width = tl.load(row + _WIDTH).to(tl.int32)
        count, nucleus = tl.load(top_k + request), tl.load(top_p + request)
        low, high = _window(sums, request, splits, width, aim, count, nucleus, SPLITS, EDGES)
        if split == 0:
            tl.store(row + _LOW, low.to(tl.int64))
            tl.store(row + _HIGH, high.to(tl.int64))
        distance = distance_of(x.to(tl.float32), tl.load(tops + request), tl.load(temperature + request))
        inside = (distance >= low) & (distance < high)
        number = tl.sum(inside.to(tl.int32), axis=0)
        at = request * splits + split
        first = request * 0
        if number > 0:
            first = tl.atomic_add(row + _LISTED, number.to(tl.int64), sem="relaxed")
            place = tl.cumsum(inside.to(tl.int32), axis=0) - 1
            tl.store(listed + request * (splits * PART) + first + place, distance, mask=inside)
        tl.store(segments + at * 2, first.to(tl.int32))
        tl.store(segments + at * 2 + 1, number)
        if aim == MASS:
            major, minor = halves_of(distance)
            tl.store(whole + at, joined(tl.sum(major, axis=0), tl.sum(minor, axis=0)))
            before = distance < low
            major, minor = tl.where(before, major, 0), tl.where(before, minor, 0)
            tl.store(ahead + at, joined(tl.sum(major, axis=0), tl.sum(minor, axis=0)))


@triton.jit
def _measured(distance, aim):
    """Halves of what is added up: weights, but while tokens are counted, each is 1."""
    major, minor = halves_of(distance)
    return tl.where(aim == _COUNT, 0, major), tl.where(aim == _COUNT, 1, minor)


@triton.jit
def _tally(listed, count, aim, low, high, TILE: tl.constexpr, BUCKETS: tl.constexpr):
    """What the listed tokens in [low, high] add up to, until the end of each eighth of it, int64 [BUCKETS]; and the
    smallest and the largest distance among them."""
    span = high - low
    end = (tl.arange(0, BUCKETS) + 1) * (span // BUCKETS + 1)
    sums = tl.zeros((BUCKETS,), dtype=tl.int64)
    nearest = span + 1
    farthest = span * 0 - 1
    for first in range(0, count, TILE):
        place = first + tl.arange(0, TILE)
        distance = tl.load(listed + place, mask=place < count, other=-1)
        offset = distance - low
        inside = (distance >= low) & (distance <= high)
        nearest = tl.minimum(nearest, tl.min(tl.where(inside, offset, span + 1), axis=0))
        farthest = tl.maximum(farthest, tl.max(tl.where(inside, offset, -1), axis=0))
        major, minor = _measured(distance, aim)
        before = tl.where(inside, offset, 2147483647)[:, None] < end[None, :]
        many = tl.sum(tl.where(before, major[:, None], 0), axis=0)
        few = tl.sum(tl.where(before, minor[:, None], 0), axis=0)
        sums += joined(many, few)
    return sums, low + nearest, low + farthest


@triton.jit
def _goal(whole, top_p):
    """The mass that top-p must reach, of the whole one."""
    return tl.maximum(tl.ceil(whole.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _narrow(state, sums, nearest, farthest, top_p, BUCKETS: tl.constexpr):
    """The next state of a search, from what the interval of this one adds up to. A state is the aim; the interval
    [low, high] that holds the cut-off; what lies before it; what must be reached; the cut-off so far, cut and spare."""
    aim, low, high, before, target, cut, spare = state
    total = tl.max(sums, axis=0)
    width = (high - low) // BUCKETS + 1
    counting = aim == _COUNT
    if aim == _WHOLE:  # all that stays after top-k has been weighed: now the mass to reach is known
        target = _goal(total + spare * weight_of(cut), top_p)
    found = before + total < target
    if found:
        if not counting:  # top-p ends among the tokens at the top-k cut-off; else there are fewer tokens than top-k
            each = tl.maximum(weight_of(cut), 1)
            spare = tl.minimum(spare, (target - total + each - 1) // each)
    else:
        short = before + sums < target
        reached = before + tl.min(tl.where(short, total, sums), axis=0)
        before += tl.max(tl.where(short, sums, 0), axis=0)
        low += tl.sum(short.to(tl.int32), axis=0) * width
        high = tl.minimum(tl.minimum(low + (width - 1), high), farthest)
        low = tl.maximum(low, nearest)
        exact = counting & (reached == target)  # the whole bucket stays
        found = exact | (low >= high)
        if found:
            each = tl.where(counting, 1, tl.maximum(weight_of(low), 1))
            spare = tl.where(exact, 0, (target - before + each - 1) // each)
            cut = tl.where(exact, high + 1, low)
    following = tl.where(counting & (top_p < 1.0), _WHOLE, NONE)
    aim = tl.where(found, following, tl.where(counting, _COUNT, MASS)).to(tl.int64)
    low = tl.where(found, 0, low)
    high = tl.where(found, cut - 1, high)
    before = tl.where(found, 0, before)
    return aim, low, high, before, target, cut, spare


@triton.jit
def _settle(
    top_k, top_p, state, whole, ahead, listed, splits,
    PART: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = state + request * FIELDS
    aim = tl.load(row + AIM)
    if aim != NONE:
        split = tl.arange(0, SPLITS)
        at = request * splits + split
        weighed = split < tl.where(aim == MASS, splits, 0)
        before = tl.sum(tl.load(ahead + at, mask=weighed, other=0), axis=0)
        mass = tl.sum(tl.load(whole + at, mask=weighed, other=0), axis=0)
        nucleus = tl.load(top_p + request)
        target = tl.where(aim == _COUNT, tl.load(top_k + request).to(tl.int64), _goal(mass, nucleus))
        low, high = tl.load(row + _LOW).to(tl.int32), tl.load(row + _HIGH).to(tl.int32) - 1
        count = tl.load(row + _LISTED).to(tl.int32)
        cut, spare = tl.load(row + CUT).to(tl.int32), tl.load(row + SPARE)
        mine = listed + request * (splits * PART)
        while aim != NONE:
            if count <= TILE:
                sums, nearest, farthest = _tally(mine, count, aim, low, high, TILE, BUCKETS)
            else:  # each tile waits for the one before
                sums, nearest, farthest = _tally(mine, count, aim, low, high, 4 * TILE, BUCKETS)
            now = (aim, low, high, before, target, cut, spare)
            aim, low, high, before, target, cut, spare = _narrow(now, sums, nearest, farthest, nucleus, BUCKETS)
        tl.store(row + CUT, cut.to(tl.int64))
        tl.store(row + SPARE, spare)


def find_cut_off(
    logits: Tensor, tops: Tensor, logsums: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> CutOffs:
    """Takes 4 bytes of memory per logit, parts rounded up, of which few are touched."""
    requests, vocab = logits.shape
    splits = triton.cdiv(vocab, weights.PART)
    state = torch.empty((requests, FIELDS.value), dtype=torch.int64, device=logits.device)
    sums = torch.empty((requests, splits, _EDGES), dtype=torch.float32, device=logits.device)
    ahead = torch.empty((requests, splits), dtype=torch.int64, device=logits.device)
    whole = torch.empty_like(ahead)
    segments = torch.empty((requests, splits, 2), dtype=torch.int32, device=logits.device)
    listed = torch.empty((requests, splits * weights.PART), dtype=torch.int32, device=logits.device)
    row = (logits.stride(0), vocab, splits)
    padded = triton.next_power_of_2(splits)
    # One warp: its 16 sums need no barrier.
    _survey[(requests, splits)](
        logits, tops, logsums, temperature, top_k, top_p, state, sums, *row,
        PART=weights.PART, TILE=_TILE, EDGES=_EDGES, num_warps=1,
    )  # fmt: skip
    _collect[(requests, splits)](
        logits, tops, temperature, top_k, top_p, state, sums, whole, ahead, segments, listed, *row,
        PART=weights.PART, SPLITS=padded, EDGES=_EDGES, num_warps=4,
    )  # fmt: skip
    _settle[(requests,)](
        top_k, top_p, state, whole, ahead, listed, splits,
        PART=weights.PART, TILE=_TILE, SPLITS=padded, BUCKETS=_BUCKETS, num_warps=8,
    )  # fmt: skip
    return CutOffs(state, ahead, segments, listed)
