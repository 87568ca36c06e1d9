"""What the sampling kernels mean, by sorting, in plain torch: what tests compare with, and what runs without a GPU.

Distances and weights are the integers of `sampling/weights.py`, so that a kernel and its meaning choose the same
tokens; only exp may differ in its last bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LIMIT = 28 << 26  # the largest distance; its weight is 0
ONE = 2.0**38  # the weight of the most probable token
_LOW = 0xFFFFFFFF


def distances(logits: Tensor, temperature: Tensor) -> Tensor:
    """How far each logit is below the largest, int64 [requests, vocab]."""
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    top = torch.where(top.isneginf(), 0.0, top)
    gap = (top - logits) * (2.0**26 / temperature.clamp(min=1e-6)[:, None])
    return gap.clamp(max=float(LIMIT)).long()


def weights(distance: Tensor) -> Tensor:
    """2**38 * exp(-distance), int64."""
    return (torch.exp2(distance.float() * -(math.log2(math.e) / 2**26)).double() * ONE).round().long()


def allowed(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens may be drawn, bool [requests, vocab]. Rows of temperature 0 mean nothing here."""
    distance = distances(logits, temperature)
    order = distance.argsort(dim=-1, stable=True)
    weight = weights(distance).gather(-1, order)
    rank = torch.arange(weight.shape[1], device=weight.device)
    stays = (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    weight = torch.where(stays, weight, 0)
    target = (weight.sum(-1, keepdim=True).double() * top_p[:, None].double()).ceil().long().clamp(min=1)
    before = weight.cumsum(-1) - weight
    stays &= (before < target) | (top_p[:, None] >= 1)
    stays &= (weight >= (min_p[:, None] * ONE).long()) & (weight > 0)
    return torch.zeros_like(stays).scatter(-1, order, stays)


def uniform(seed: Tensor, step: Tensor) -> Tensor:
    """53 random bits for each (seed, step): the first two words of Philox 4x32 with ten rounds, int64."""
    c0, c1 = step & _LOW, (step >> 32) & _LOW
    c2, c3 = torch.zeros_like(step), torch.zeros_like(step)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high_b, low_b = _product(0xCD9E8D57, c2)
        high_a, low_a = _product(0xD2511F53, c0)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return (c0 >> 5) * 2**26 + (c1 >> 6)


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of factor * x, both of 32 bits: by halves of x, to stay within int64."""
    low = factor * (x & 0xFFFF)
    high = factor * (x >> 16) + (low >> 16)
    return high >> 16, ((high << 16) | (low & 0xFFFF)) & _LOW


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """See `sampling/sample.py`."""
    stays = allowed(logits, temperature, top_k, top_p, min_p)
    upto = torch.where(stays, weights(distances(logits, temperature)), 0).cumsum(-1)
    whole = upto[:, -1]
    drawn = (uniform(seed, step).double() * 2.0**-53 * whole.double()).long().clamp(max=whole - 1)
    drawn_tokens = (upto <= drawn[:, None]).sum(-1)
    tokens = _largest(logits)
    tokens = torch.where((temperature > 0) & (whole > 0) & (tokens >= 0), drawn_tokens, tokens)
    return tokens, _logprobs(logits, tokens)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `sampling/greedy.py`."""
    tokens = _largest(logits)
    return tokens, _logprobs(logits, tokens)


def _largest(logits: Tensor) -> Tensor:
    top = logits.amax(-1, keepdim=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    tokens = torch.where(logits == top, places, logits.shape[1]).amin(-1)
    return torch.where(top[:, 0] < math.inf, tokens, -1)  # NaN is the largest, too


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    found = logits.float().log_softmax(-1).gather(-1, tokens[:, None].clamp(min=0))[:, 0]
    found = torch.where(logits.amax(-1).isneginf(), -math.inf, found)
    return torch.where(tokens < 0, math.nan, found)
