"""Which sequences of calibration data are learned from, and which judge what was learned.

Sequences are drawn in random order, so the last ones are like all others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

JUDGED = 32  # sequences at most that no step learns from, and that steps are compared on
SHARE_JUDGED = 8  # one of so many sequences; with fewer, steps learn from those that they are compared on


def judged(count: int) -> range:
    """Those that steps are compared on: the last. Learned from, they would praise what is learned by heart."""
    some = min(JUDGED, count // SHARE_JUDGED)
    return range(count - some, count) if some else range(count)


def fitted(count: int) -> int:
    """How many of the first sequences may be learned from."""
    return judged(count).start or count


def learning_order(count: int, seed: int) -> Iterator[int]:
    """Those that steps learn from, in random order, again and again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(fitted(count), generator=generator).tolist()
