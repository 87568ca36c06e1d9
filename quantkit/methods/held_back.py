"""Which sequences of calibration data are learned from, and which judge what was learned."""

from __future__ import annotations

from collections.abc import Iterator

import torch

JUDGED = 32  # sequences at most that no step learns from, and that steps are compared on
SHARE_JUDGED = 8  # one of so many sequences; with fewer, steps learn from those that they are compared on


def judged(count: int) -> list[int]:
    """Those that steps are compared on, evenly spaced. Learned from, they would praise what is learned by heart."""
    some = min(JUDGED, count // SHARE_JUDGED)
    return [place * count // some for place in range(some)] if some else list(range(count))


def learning_order(count: int, seed: int) -> Iterator[int]:
    """Those that steps learn from, in random order, again and again."""
    held_back, generator = set(judged(count)), torch.Generator().manual_seed(seed)
    learned = [number for number in range(count) if number not in held_back] or list(range(count))
    while True:
        yield from (learned[place] for place in torch.randperm(len(learned), generator=generator).tolist())
