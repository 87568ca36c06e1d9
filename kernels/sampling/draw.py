"""A draw by inverse CDF in the order of indices, exact: parts of the row, groups of 64 tokens in the part, the token.

A unit (part, group or token) has the weight of its tokens before the cut-off, and a number of tokens at the cut-off, of
which the first ones in the row stay. Units before it take theirs first, so each level of the descent is the same step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.kernels.sampling import weights
from quantkit.kernels.sampling.cut_off import AIM, CUT, FIELDS, MASS, NONE, SPARE, CutOffs
from quantkit.kernels.sampling.weights import LIMIT, ONE, distance_of, halves_of, joined, weight_of

_GROUP = 64
_TILE = 1024  # of the list, in registers at a time


@triton.jit
def _before(distance, cut):
    """Halves of the weight of tokens before the cut-off, else 0, and 1 for tokens at it."""
    high, low = halves_of(distance)
    before = distance < cut
    return tl.where(before, high, 0), tl.where(before, low, 0), (distance == cut).to(tl.int32)


@triton.jit
def _drawable(row, token, vocab, top, temperature, min_p, cut):
    """Those of some tokens of a row, after min-p."""
    x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    distance = distance_of(x, top, temperature)
    if min_p > 0.0:  # comparing 64 bits is a fifth of the instructions
        distance = tl.where(weight_of(distance) >= (min_p * ONE).to(tl.int64), distance, LIMIT + 1)
    return _before(distance, cut)


@triton.jit
def _weigh(
    logits, tops, temperature, min_p, state, ahead, segments, listed, masses, ties, stride, vocab, splits,
    PART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of each part of a row: the weight before the cut-off and the number of tokens at it. Where top-k or top-p cut and
    min-p does not, the list that they were found with is enough."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    heat = tl.load(temperature + request)
    if heat > 0.0:
        least, aim = tl.load(min_p + request), tl.load(state + request * FIELDS + AIM)
        cut = tl.load(state + request * FIELDS + CUT).to(tl.int32)
        at = request * splits + split
        if (aim == NONE) | (least > 0.0):
            token = split * PART + tl.arange(0, PART)
            row = logits + request * stride
            high, low, tied = _drawable(row, token, vocab, tl.load(tops + request), heat, least, cut)
            tl.store(masses + at, joined(tl.sum(high, axis=0), tl.sum(low, axis=0)))
            tl.store(ties + at, tl.sum(tied, axis=0))
        else:
            mass = tl.load(ahead + at, mask=aim == MASS, other=0)
            first, count = tl.load(segments + at * 2), tl.load(segments + at * 2 + 1)
            number = count * 0
            for start in range(0, count, TILE):
                place = start + tl.arange(0, TILE)
                mine = listed + request * (splits * PART) + first + place
                major, minor, at_cut = _before(tl.load(mine, mask=place < count, other=LIMIT + 1), cut)
                mass += joined(tl.sum(major, axis=0), tl.sum(minor, axis=0))
                number += tl.sum(at_cut, axis=0)
            tl.store(masses + at, mass)
            tl.store(ties + at, number)


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
def _with_ties(mass, tied, spare, each):
    """The weight of every unit with its tokens at the cut-off, and how many of those may stay from it on."""
    left = tl.maximum(spare - (tl.cumsum(tied, axis=0) - tied), 0)
    return mass + tl.minimum(tied, left) * each, left


@triton.jit
def _descend(mass, left, unit, drawn):
    """The unit that holds `drawn`; for its own units, what is drawn and how many tokens at the cut-off may stay."""
    upto = tl.cumsum(mass, axis=0)
    passed = upto <= drawn
    chosen = tl.sum(passed.to(tl.int32), axis=0)
    return chosen, drawn - tl.max(tl.where(passed, upto, 0), axis=0), tl.max(tl.where(unit == chosen, left, 0), axis=0)


@triton.jit
def _draw_in_part(
    row, start, vocab, top, temperature, min_p, cut, each, drawn, spare, PART: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """The token from `start` on that holds `drawn`."""
    group, member = tl.arange(0, PART // GROUP), tl.arange(0, GROUP)
    token = start + group[:, None] * GROUP + member[None, :]
    high, low, at_cut = _drawable(row, token, vocab, top, temperature, min_p, cut)
    tied = tl.sum(at_cut, axis=1).to(tl.int64)
    mass, left = _with_ties(joined(tl.sum(high, axis=1), tl.sum(low, axis=1)), tied, spare, each)
    chosen, drawn, spare = _descend(mass, left, group, drawn)

    start += chosen * GROUP
    high, low, at_cut = _drawable(row, start + member, vocab, top, temperature, min_p, cut)
    mass, left = _with_ties(joined(high, low), at_cut.to(tl.int64), spare, each)
    chosen, drawn, spare = _descend(mass, left, member, drawn)
    return tl.minimum(start + chosen, vocab - 1)


@triton.jit
def _draw(
    logits, tops, logsums, temperature, min_p, seed, step, state, masses, ties, tokens, logprobs, stride, vocab, splits,
    PART: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + request)
    split = tl.arange(0, SPLITS)
    at = request * splits + split
    weighed = split < tl.where(heat > 0.0, splits, 0)
    cut = tl.load(state + request * FIELDS + CUT).to(tl.int32)
    spare = tl.load(state + request * FIELDS + SPARE)
    each = weight_of(cut)
    tied = tl.load(ties + at, mask=weighed, other=0).to(tl.int64)
    mass, left = _with_ties(tl.load(masses + at, mask=weighed, other=0), tied, spare, each)
    whole = tl.sum(mass, axis=0)
    logsum = tl.load(logsums + request)
    if (whole > 0) & (logsum == logsum):  # else the greedy choice stays, or none
        drawn = _below(tl.load(seed + request), tl.load(step + request), whole)
        part, drawn, spare = _descend(mass, left, split, drawn)
        top, least = tl.load(tops + request), tl.load(min_p + request)
        row = logits + request * stride
        token = _draw_in_part(row, part * PART, vocab, top, heat, least, cut, each, drawn, spare, PART, GROUP)
        tl.store(tokens + request, token.to(tl.int64))
        tl.store(logprobs + request, tl.load(row + token).to(tl.float32) - logsum)


def draw(
    logits: Tensor, tops: Tensor, logsums: Tensor, temperature: Tensor, min_p: Tensor, seed: Tensor, step: Tensor,
    cut_offs: CutOffs, result: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Writes the result of rows of a temperature above 0."""
    requests, vocab = logits.shape
    splits = triton.cdiv(vocab, weights.PART)
    masses = torch.empty((requests, splits), dtype=torch.int64, device=logits.device)
    ties = torch.empty_like(masses, dtype=torch.int32)
    row = (logits.stride(0), vocab, splits)
    _weigh[(requests, splits)](
        logits, tops, temperature, min_p, cut_offs.state, cut_offs.ahead, cut_offs.segments, cut_offs.listed,
        masses, ties, *row, PART=weights.PART, TILE=_TILE, num_warps=8,
    )  # fmt: skip
    _draw[(requests,)](
        logits, tops, logsums, temperature, min_p, seed, step, cut_offs.state, masses, ties, *result, *row,
        PART=weights.PART, SPLITS=triton.next_power_of_2(splits), GROUP=_GROUP, num_warps=8,
    )  # fmt: skip
