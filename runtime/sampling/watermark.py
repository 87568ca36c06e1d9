"""The green list of a watermark, on the device (Kirchenbauer et al., "A Watermark for Large Language Models", 2023,
with one token of context): the logits of green tokens get delta more before a token is chosen.

    green(previous, token)  where  splitmix(splitmix(key, previous), token) < gamma * 2**64

`splitmix(state, n)` is the n-th number of the generator SplitMix64 that starts from `state`. The paper shuffles the
vocabulary by a generator seeded with key and previous token, and takes the first gamma of it. Here every pair draws for
itself, from its number alone: one elementwise pass over the logits, no table, no sorting, any vocabulary, and nothing
that the host must know. So the share of green tokens behind a token is gamma only on average (its standard deviation
is sqrt(gamma * (1 - gamma) / vocabulary)), but different pairs are independent: in a text that was written without the
key, the green ones among its T different pairs are binomial with T and gamma, which is the detector's null hypothesis
(`runtime/watermark_detector.py`). In the paper's lists of fixed size, pairs with the same first token exclude each
other a little.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from quantkit.runtime.core.sequence import Sequence

_STEP, _FIRST, _SECOND = (  # SplitMix64's, as signed numbers
    number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_BITS = 31  # of a pair's number that are compared: its upper ones
_MARKED_ROWS = 64  # at a time: their numbers are int64, beside the logits in float32


def splitmix(state: Tensor, number: Tensor) -> Tensor:
    """64 bits for each, int64; sums and products wrap."""
    mixed = state + (number + 1) * _STEP
    mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
    return mixed ^ _shifted(mixed, 31)


def green(seed: Tensor, before: Tensor, tokens: Tensor, least: Tensor) -> Tensor:
    """Which `tokens` are green behind those `before` them, bool. All are int64 and as broadcast; `seed` is the key's,
    `least` the `green_numbers` of its gamma."""
    return _shifted(splitmix(splitmix(seed, before), tokens), 64 - _BITS) < least


def green_numbers(gamma: float) -> int:
    """How many of 2**31 numbers mean green."""
    return round(gamma * (1 << _BITS))


def green_share(gamma: float) -> float:
    """What `green_numbers` makes of gamma."""
    return green_numbers(gamma) / (1 << _BITS)


def _shifted(number: Tensor, bits: int) -> Tensor:
    """To the right, as if it had no sign."""
    return (number >> bits) & ((1 << (64 - bits)) - 1)


class GreenLists:
    """Adds to logits what the watermarks of their requests say. The parameters stay on the device as long as the same
    sequences ask."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._tokens = torch.arange(vocab, device=device)
        self._device = device
        self._owners: tuple[tuple[int, int], ...] = ()  # row and sequence
        self._whole = torch.empty(0, dtype=torch.int64)  # rows, seeds, least numbers; [3, marked]
        self._delta = torch.empty(0)

    def mark(self, logits: Tensor, sequences: Ordered[Sequence], before: Tensor | None) -> None:
        """Changes the float32 `logits` [rows, vocab] in place; `before` [rows] are the tokens in front of each row."""
        marked = [row for row, sequence in enumerate(sequences) if sequence.params.watermark is not None]
        if not marked:
            return
        assert before is not None, "a watermark needs the tokens in front"
        self._remember(marked, sequences)
        for start in range(0, len(marked), _MARKED_ROWS):
            rows, seed, least = self._whole[:, start : start + _MARKED_ROWS]
            listed = green(seed[:, None], before[rows][:, None], self._tokens, least[:, None])
            logits[rows] += listed * self._delta[start : start + _MARKED_ROWS, None]

    def _remember(self, marked: list[int], sequences: Ordered[Sequence]) -> None:
        owners = tuple((row, sequences[row].id) for row in marked)
        if owners == self._owners:
            return
        marks = [mark for row in marked if (mark := sequences[row].params.watermark) is not None]
        numbers = [marked, [mark.seed for mark in marks], [green_numbers(mark.gamma) for mark in marks]]
        self._whole = torch.tensor(numbers).to(self._device, non_blocking=True)
        self._delta = torch.tensor([float(mark.delta) for mark in marks]).to(self._device, non_blocking=True)
        self._owners = owners
