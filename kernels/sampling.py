"""The next token of every request, drawn on the GPU: greedy, temperature, top-k, top-p, min-p, a seed for each request.

Layout   logits [requests, vocab], rows of any stride; every parameter is a tensor [requests]:
         temperature float32, 0 for the largest logit (the first of equal ones), 1e-6 where it is between; top_k int32,
         0 for all; top_p float32, 1 for all; min_p float32, 0 for all; seed int64; step int64, the token's position
Returns  tokens int64 [requests] and their log-probabilities float32 [requests], those of the untruncated distribution
         at temperature 1
Meaning  `reference.sampling`. Temperature first; then the k most probable tokens; of those, renormalised, the fewest
         whose mass reaches top_p; of those, the ones at least min_p times as probable as the most probable token. Of
         equally probable tokens at a cut-off the first ones stay, by index. At least one token always stays
Limits   logits bfloat16, float16 or float32, without NaN or +inf; -inf bans a token; vocab up to 262,144

A token's probability is kept as two integers, so that sums do not depend on their order and a draw depends on nothing
but the request's own logits, parameters, seed and step:
    distance   how far its logit is below the largest, over the temperature, in steps of 2**-26: equal distances are
               equal probabilities to float32's precision, and small distances come first in the order of tokens
    weight     2**38 * exp(-distance), rounded; 0 from a distance of 28 on: such a token is never drawn
A cut-off is a distance with the number of tokens at it that stay. It is found by narrowing an interval of distances to
an eighth in every launch, without sorting: each program weighs its part of the vocabulary up to the end of each
eighth, and every program of the next launch adds these sums up and picks the same eighth. Most rows are settled after
four to eight launches; the others go on in one program a row. The draw is by inverse CDF, with Philox on (seed, step).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import InputError
from quantkit.kernels.checks import HALVES, check_contiguous, check_dtype, check_rows, check_same_device, check_shape

LARGEST_VOCAB = 262144
_CHUNK = 4096  # of the vocabulary, per program
_TILE = 2048  # that are in registers at a time, 1024 to 4096; one without a token in the interval is passed over
_BUCKETS = 8
_NARROWINGS = 12  # launches; top-k and then top-p take five to eight each where the vocabulary is 128k

_FIELDS = tl.constexpr(8)  # of the state of a search, one of them unused: rows of 64 bytes stay aligned
_LIMIT = tl.constexpr(28 << 26)  # the largest distance; its weight is 0
_STEPS = tl.constexpr(67108864.0)  # 2**26
_LOG2_E_A_STEP = tl.constexpr(1.4426950408889634 / 67108864.0)
_ONE = tl.constexpr(274877906944.0)  # 2**38, the weight of the most probable token
_HALF = tl.constexpr(524288.0)  # 2**19
_TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to whole numbers

# What the search of a row looks for. MASS starts when everything below the top-k cut-off has been weighed once.
_COUNT = tl.constexpr(0)
_WHOLE = tl.constexpr(1)
_MASS = tl.constexpr(2)
_DONE = tl.constexpr(3)


@triton.jit
def _distance(x, top, temperature):
    temperature = tl.maximum(temperature, 1e-6)
    gap = (top - x) * tl.div_rn(temperature * 0.0 + _STEPS, temperature)
    return tl.minimum(gap, _LIMIT * 1.0).to(tl.int32)


@triton.jit
def _halves(distance):
    """The high and the low 19 bits of the weight, as whole numbers in float32: weight = high * 2**19 + low."""
    scaled = tl.exp2(distance.to(tl.float32) * -_LOG2_E_A_STEP) * _HALF
    high = (scaled + _TO_WHOLE) - _TO_WHOLE
    low = ((scaled - high) * _HALF + _TO_WHOLE) - _TO_WHOLE
    return high, low


@triton.jit
def _joined(high, low):
    return high.to(tl.int64) * 524288 + low.to(tl.int64)


@triton.jit
def _weight(distance):
    high, low = _halves(distance)
    return _joined(high, low)


@triton.jit
def _scan(logits, maxima, places, sums, stride, vocab, splits, CHUNK: tl.constexpr):
    """Largest logit, its first place and the sum of exp below it, of each part of a row."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    token = split * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + request * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    place = tl.min(tl.where(x == top, token, vocab - 1), axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    at = request * splits + split
    tl.store(maxima + at, top)
    tl.store(places + at, place)
    tl.store(sums + at, tl.sum(tl.exp(x - base), axis=0))


@triton.jit
def _choose_largest(
    maxima, places, sums, tokens, logprobs, tops, logsums, temperature, top_k, top_p, state, vocab, splits,
    SPLITS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """The greedy choice; for a draw, also the first state of the search for its cut-off."""
    request = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    at = request * splits + split
    part = tl.load(maxima + at, mask=split < splits, other=float("-inf"))
    place = tl.load(places + at, mask=split < splits, other=2147483647)
    total = tl.load(sums + at, mask=split < splits, other=0.0)
    top = tl.max(part, axis=0)
    tl.store(tokens + request, tl.min(tl.where(part == top, place, 2147483647), axis=0).to(tl.int64))
    banned = top == float("-inf")  # every token
    top = tl.where(banned, 0.0, top)
    logsum = top + tl.log(tl.where(banned, 1.0, tl.sum(total * tl.exp(part - top), axis=0)))
    tl.store(logprobs + request, tl.where(banned, float("-inf"), top - logsum))
    if SEARCH:
        tl.store(tops + request, top)
        tl.store(logsums + request, logsum)
        count = tl.load(top_k + request).to(tl.int64)
        counts = (count > 0) & (count < vocab)
        phase = tl.where(counts, _COUNT, tl.where(tl.load(top_p + request) < 1.0, _WHOLE, _DONE))
        phase = tl.where((tl.load(temperature + request) <= 0.0) | banned, _DONE, phase)
        none = count * 0
        _save(state + request * _FIELDS, (phase, none, none + (_LIMIT - 1), none, count, none + _LIMIT, none))


@triton.jit
def _save(at, state):
    for i in tl.static_range(7):
        tl.store(at + i, state[i].to(tl.int64))


@triton.jit
def _restore(at):
    """What the search is at (phase); the interval [low, high] that holds the cut-off; what lies before it; what must be
    reached; the cut-off so far: the distance from which on tokens are dropped, and how many at that distance stay."""
    low, high, cut = tl.load(at + 1).to(tl.int32), tl.load(at + 2).to(tl.int32), tl.load(at + 5).to(tl.int32)
    return tl.load(at), low, high, tl.load(at + 3), tl.load(at + 4), cut, tl.load(at + 6)


@triton.jit
def _tally(row, start, end, top, temperature, phase, low, high, TILE: tl.constexpr, BUCKETS: tl.constexpr):
    """What the tokens of [start, end) weigh in the interval: up to the end of each bucket, int64 [BUCKETS], and the
    smallest and the largest distance among them. While tokens are counted, each weighs 1."""
    lanes: tl.constexpr = 1024
    counted = tl.where(phase == _COUNT, 1.0, 0.0)
    weighed = 1.0 - counted
    place = tl.arange(0, TILE // lanes)[:, None] * lanes + tl.arange(0, lanes)[None, :]
    bucket = tl.arange(0, BUCKETS)
    sums = tl.zeros((BUCKETS,), dtype=tl.int64)
    span = high - low
    nearest = span + 1
    farthest = span * 0 - 1
    width = span // BUCKETS + 1
    for first in range(start, end, TILE):
        x = tl.load(row + first + place, mask=first + place < end, other=float("-inf")).to(tl.float32)
        distance = _distance(x, top, temperature)
        offset = distance - low
        inside = (offset >= 0) & (offset <= span)
        closest = tl.min(tl.min(tl.where(inside, offset, span + 1), axis=0), axis=0)
        if closest <= span:  # some token of this tile is in the interval
            nearest = tl.minimum(nearest, closest)
            farthest = tl.maximum(farthest, tl.max(tl.max(tl.where(inside, offset, -1), axis=0), axis=0))
            major, minor = _halves(distance)
            major = tl.where(inside, major * weighed, 0.0)
            minor = tl.where(inside, minor * weighed + counted, 0.0)
            for i in tl.static_range(BUCKETS):
                before = 1.0 if i == BUCKETS - 1 else tl.where(offset < (i + 1) * width, 1.0, 0.0)
                # Up to 32 tokens add up exactly in float32; in int64 from the start, a launch took twice the steps.
                many = tl.sum(tl.reshape(tl.sum(major * before, axis=0), (lanes // 8, 8)), axis=1)
                few = tl.sum(tl.reshape(tl.sum(minor * before, axis=0), (lanes // 8, 8)), axis=1)
                sums += tl.where(bucket == i, tl.sum(_joined(many, few), axis=0), 0)
    return sums, low + nearest, low + farthest


@triton.jit
def _narrow(state, sums, nearest, farthest, top_p, BUCKETS: tl.constexpr):
    """The next state, from what the interval of this one weighs."""
    phase, low, high, before, target, cut, spare = state
    total = tl.max(sums, axis=0)
    width = (high - low) // BUCKETS + 1
    counting = phase == _COUNT
    if phase == _WHOLE:  # all that stays after top-k has been weighed: now the mass to reach is known
        whole = total + spare * _weight(cut)
        target = tl.maximum(tl.ceil(whole.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
    found = before + total < target
    if found:
        if not counting:  # top-p ends among the tokens at the top-k cut-off; else there are fewer tokens than top-k
            each = tl.maximum(_weight(cut), 1)
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
            each = tl.where(counting, 1, tl.maximum(_weight(low), 1))
            spare = tl.where(exact, 0, (target - before + each - 1) // each)
            cut = tl.where(exact, high + 1, low)
    following = tl.where(counting & (top_p < 1.0), _WHOLE, _DONE)
    phase = tl.where(found, following, tl.where(counting, _COUNT, _MASS)).to(tl.int64)
    low = tl.where(found, 0, low)
    high = tl.where(found, cut - 1, high)
    before = tl.where(found, 0, before)
    return phase, low, high, before, target, cut, spare


@triton.jit
def _advance(state, sums, hulls, top_p, request, splits, SPLITS: tl.constexpr, BUCKETS: tl.constexpr):
    """The next state, from what all programs of the last launch found in this row."""
    phase, low, high, before, target, cut, spare = state
    if phase != _DONE:
        split = tl.arange(0, SPLITS)
        known = split < splits
        at = request * splits + split
        place = at[:, None] * BUCKETS + tl.arange(0, BUCKETS)[None, :]
        whole = tl.sum(tl.load(sums + place, mask=known[:, None], other=0), axis=0)
        nearest = tl.min(tl.load(hulls + at * 4, mask=known, other=2147483647), axis=0)
        farthest = tl.max(tl.load(hulls + at * 4 + 1, mask=known, other=-1), axis=0)
        phase, low, high, before, target, cut, spare = _narrow(state, whole, nearest, farthest, top_p, BUCKETS)
    return phase, low, high, before, target, cut, spare


@triton.jit
def _search(
    logits, tops, temperature, top_p, old_state, old_sums, old_hulls, state, sums, hulls, stride, vocab, splits,
    FIRST: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """One narrowing of every row: the state by the last launch's sums, and this part's sums for the next launch."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    now = _restore(old_state + request * _FIELDS)
    if not FIRST:
        now = _advance(now, old_sums, old_hulls, tl.load(top_p + request), request, splits, SPLITS, BUCKETS)
    if split == 0:
        _save(state + request * _FIELDS, now)
    phase, low, high = now[0], now[1], now[2]
    if phase != _DONE:
        top, heat = tl.load(tops + request), tl.load(temperature + request)
        start = split * CHUNK
        end = tl.minimum(start + CHUNK, vocab)
        row = logits + request * stride
        part, nearest, farthest = _tally(row, start, end, top, heat, phase, low, high, TILE, BUCKETS)
        at = request * splits + split
        tl.store(sums + at * BUCKETS + tl.arange(0, BUCKETS), part)
        tl.store(hulls + at * 4, nearest)
        tl.store(hulls + at * 4 + 1, farthest)


@triton.jit
def _settle(
    logits, tops, temperature, top_p, old_state, old_sums, old_hulls, state, stride, vocab, splits,
    TILE: tl.constexpr, SPLITS: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Ends the search of every row: most have ended already, the others go on in one program."""
    request = tl.program_id(0).to(tl.int64)
    top, heat, nucleus = tl.load(tops + request), tl.load(temperature + request), tl.load(top_p + request)
    now = _restore(old_state + request * _FIELDS)
    now = _advance(now, old_sums, old_hulls, nucleus, request, splits, SPLITS, BUCKETS)
    phase, low, high, before, target, cut, spare = now
    row = logits + request * stride
    while phase != _DONE:
        whole, nearest, farthest = _tally(row, 0, vocab, top, heat, phase, low, high, TILE, BUCKETS)
        now = (phase, low, high, before, target, cut, spare)
        phase, low, high, before, target, cut, spare = _narrow(now, whole, nearest, farthest, nucleus, BUCKETS)
    _save(state + request * _FIELDS, (phase, low, high, before, target, cut, spare))


@triton.jit
def _drawable(row, token, vocab, top, temperature, min_p, cut):
    """Weight of the tokens before the cut-off, and which tokens are at it; both after min-p."""
    x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    distance = _distance(x, top, temperature)
    weight = _weight(distance)
    stays = weight >= (min_p * _ONE).to(tl.int64)
    return tl.where(stays & (distance < cut), weight, 0), stays & (distance == cut) & (weight > 0)


@triton.jit
def _weigh(
    logits, tops, temperature, min_p, state, masses, ties, stride, vocab, splits, CHUNK: tl.constexpr
):  # fmt: skip
    """Of each part of a row: the weight before the cut-off and the number of tokens at it."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    heat = tl.load(temperature + request)
    if heat > 0.0:
        top, least = tl.load(tops + request), tl.load(min_p + request)
        cut = tl.load(state + request * _FIELDS + 5).to(tl.int32)
        token = split * CHUNK + tl.arange(0, CHUNK)
        weight, tied = _drawable(logits + request * stride, token, vocab, top, heat, least, cut)
        tl.store(masses + request * splits + split, tl.sum(weight, axis=0))
        tl.store(ties + request * splits + split, tl.sum(tied.to(tl.int64), axis=0))


@triton.jit
def _below(seed, step, whole):
    """A whole number from 0 to whole - 1, equally likely to float64's precision."""
    none = (step * 0).to(tl.uint32)
    high, low, _, _ = tl.philox_impl(
        step.to(tl.uint32), (step >> 32).to(tl.uint32), none, none, seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    )
    bits = (high.to(tl.int64) >> 5) * 67108864 + (low.to(tl.int64) >> 6)  # 53 of them
    drawn = bits.to(tl.float64) * (1.0 / 9007199254740992.0) * whole.to(tl.float64)
    return tl.minimum(drawn.to(tl.int64), whole - 1)


@triton.jit
def _draw(
    logits, tops, logsums, temperature, min_p, seed, step, state, masses, ties, tokens, logprobs, stride, vocab, splits,
    CHUNK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Inverse CDF in the order of indices: first the part of the vocabulary, then the token in it."""
    request = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + request)
    split = tl.arange(0, SPLITS)
    at = request * splits + split
    weighed = split < tl.where(heat > 0.0, splits, 0)
    mass = tl.load(masses + at, mask=weighed, other=0)
    tied = tl.load(ties + at, mask=weighed, other=0)
    cut = tl.load(state + request * _FIELDS + 5).to(tl.int32)
    spare = tl.load(state + request * _FIELDS + 6)
    left = tl.maximum(spare - (tl.cumsum(tied, axis=0) - tied), 0)  # of the tokens at the cut-off, for this part
    mass += tl.minimum(tied, left) * _weight(cut)
    whole = tl.sum(mass, axis=0)
    if whole > 0:
        drawn = _below(tl.load(seed + request), tl.load(step + request), whole)
        upto = tl.cumsum(mass, axis=0)
        part = tl.sum((upto <= drawn).to(tl.int32), axis=0)
        drawn -= tl.max(tl.where(upto <= drawn, upto, 0), axis=0)
        few = tl.max(tl.where(split == part, left, 0), axis=0)
        top, least = tl.load(tops + request), tl.load(min_p + request)
        row = logits + request * stride
        token = part * CHUNK + tl.arange(0, CHUNK)
        weight, at_cut = _drawable(row, token, vocab, top, heat, least, cut)
        stays = at_cut & (tl.cumsum(at_cut.to(tl.int32), axis=0) <= few)
        weight = tl.where(stays, _weight(cut), weight)
        passed = tl.cumsum(weight, axis=0) <= drawn
        chosen = tl.minimum(part * CHUNK + tl.sum(passed.to(tl.int32), axis=0), vocab - 1)
        tl.store(tokens + request, chosen.to(tl.int64))
        x = tl.load(row + chosen).to(tl.float32)
        tl.store(logprobs + request, x - tl.load(logsums + request))


def greedy(logits: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The largest logit's index and log-probability. Two launches, where a batch has nothing to draw."""
    result = _check("greedy", logits, out, {})
    if logits.shape[0]:
        _start(logits, result, None)
    return result


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, step: Tensor,
    *, out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A token and its log-probability for every request; `out` holds both where they are given."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed, "step": step}
    result = _check("sample", logits, out, given)
    requests, vocab = logits.shape
    if requests == 0:
        return result
    splits, tops, logsums, states = _start(logits, result, (temperature, top_k, top_p))
    state = _find_cut_off(logits, tops, temperature, top_p, states, splits)
    masses = torch.empty((requests, splits), dtype=torch.int64, device=logits.device)
    ties = torch.empty_like(masses)
    row = (logits.stride(0), vocab, splits)
    _weigh[(requests, splits)](
        logits, tops, temperature, min_p, state, masses, ties, *row, CHUNK=_CHUNK, num_warps=4
    )  # fmt: skip
    _draw[(requests,)](
        logits, tops, logsums, temperature, min_p, seed, step, state, masses, ties, *result, *row,
        CHUNK=_CHUNK, SPLITS=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
    return result


def _start(
    logits: Tensor, result: tuple[Tensor, Tensor], search: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[int, Tensor, Tensor, Tensor]:
    """Writes the greedy choice. Number of parts of a row, largest logits, log of the sums of exp, and room for two
    states of the search, int64 [2, requests, fields], with its first state for (temperature, top_k, top_p)."""
    requests, vocab = logits.shape
    splits = triton.cdiv(vocab, _CHUNK)
    # Tensors of their own: halves of one would be aligned or not, and Triton compiles a kernel for either.
    maxima = torch.empty((requests, splits), dtype=torch.float32, device=logits.device)
    sums, places = torch.empty_like(maxima), torch.empty_like(maxima, dtype=torch.int32)
    tops = torch.empty(requests, dtype=torch.float32, device=logits.device)
    logsums = torch.empty_like(tops)
    states = torch.empty((2, requests, _FIELDS.value), dtype=torch.int64, device=logits.device)
    _scan[(requests, splits)](
        logits, maxima, places, sums, logits.stride(0), vocab, splits, CHUNK=_CHUNK, num_warps=4
    )  # fmt: skip
    _choose_largest[(requests,)](
        maxima, places, sums, *result, tops, logsums, *(search or (None, None, None)), states[0], vocab, splits,
        SPLITS=triton.next_power_of_2(splits), SEARCH=search is not None, num_warps=1,
    )  # fmt: skip
    return splits, tops, logsums, states


def _find_cut_off(
    logits: Tensor, tops: Tensor, temperature: Tensor, top_p: Tensor, states: Tensor, splits: int
) -> Tensor:
    """The last state of the search, int64 [requests, fields]; the first one is in states[0]."""
    requests, vocab = logits.shape
    device = logits.device
    # Two of each, by turns: programs of one launch read what the launch before wrote while they write their own.
    sums = torch.empty((2, requests, splits, _BUCKETS), dtype=torch.int64, device=device)
    hulls = torch.empty((2, requests, splits, 4), dtype=torch.int32, device=device)  # two of the four are used
    sizes = {"TILE": _TILE, "SPLITS": triton.next_power_of_2(splits), "BUCKETS": _BUCKETS}
    row = (logits.stride(0), vocab, splits)
    for i in range(_NARROWINGS):
        old, new = i % 2, (i + 1) % 2
        _search[(requests, splits)](
            logits, tops, temperature, top_p, states[old], sums[old], hulls[old], states[new], sums[new], hulls[new],
            *row, FIRST=i == 0, CHUNK=_CHUNK, num_warps=4, **sizes,
        )  # fmt: skip
    old, new = _NARROWINGS % 2, (_NARROWINGS + 1) % 2
    _settle[(requests,)](
        logits, tops, temperature, top_p, states[old], sums[old], hulls[old], states[new], *row, num_warps=4, **sizes
    )
    return states[new]


def _check(
    kernel: str, logits: Tensor, out: tuple[Tensor, Tensor] | None, parameters: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The tensors for the result."""
    check_dtype(kernel, "logits", logits, (*HALVES, torch.float32))
    check_shape(kernel, "logits", logits, (None, None))
    check_rows(kernel, "logits", logits)
    requests, vocab = logits.shape
    if not 1 <= vocab <= LARGEST_VOCAB:
        raise InputError(f"{kernel}: a vocabulary of {vocab} tokens, but must be 1 to {LARGEST_VOCAB}")
    dtypes = {"top_k": torch.int32, "seed": torch.int64, "step": torch.int64}
    for name, tensor in parameters.items():
        check_dtype(kernel, name, tensor, (dtypes.get(name, torch.float32),))
        check_shape(kernel, name, tensor, (requests,))
        check_contiguous(kernel, name, tensor)
    if out is None:
        tokens = torch.empty(requests, dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(requests, dtype=torch.float32, device=logits.device)
    else:
        tokens, logprobs = out
    for name, tensor, dtype in (("tokens", tokens, torch.int64), ("logprobs", logprobs, torch.float32)):
        check_dtype(kernel, name, tensor, (dtype,))
        check_shape(kernel, name, tensor, (requests,))
        check_contiguous(kernel, name, tensor)
    check_same_device(kernel, logits=logits, tokens=tokens, logprobs=logprobs, **parameters)
    return tokens, logprobs
