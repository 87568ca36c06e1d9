"""Few pairs in which every kernel is compiled once, cards and both dtypes in turn: what every run of the tests can pay
for. Kernels that only some cards have are compiled for those."""

from __future__ import annotations

from collections import defaultdict

import torch

from compile_matrix.case import HALVES
from compile_matrix.pairs import Pair, look_at


def covering(pairs: list[Pair]) -> list[Pair]:
    """Of the pairs that launch a kernel for the card whose turn it is, one that launches most of those that lack."""
    launching: dict[tuple[str, str, torch.dtype], list[Pair]] = defaultdict(list)
    kernels: dict[Pair, set[str]] = {}
    for pair in pairs:
        if not (pair.case.tried or pair.case.grid_only or pair.case.slow):
            kernels[pair] = {launch.kernel for launch in look_at(pair, compiles=False).launches}
            for kernel in kernels[pair]:
                launching[kernel, pair.card.target, pair.dtype].append(pair)
    cards = list(dict.fromkeys(pair.card.target for pair in pairs))
    lacking = dict.fromkeys(sorted({kernel for kernel, *_ in launching}))
    chosen: list[Pair] = []
    while lacking:
        kernel = next(iter(lacking))
        able = [(card, dtype) for dtype in HALVES for card in cards if (kernel, card, dtype) in launching]
        candidates = launching[kernel, *able[len(chosen) % len(able)]]
        first = len(chosen) % len(candidates)
        pair = max([*candidates[first:], *candidates[:first]], key=lambda pair: len(kernels[pair] & lacking.keys()))
        chosen.append(pair)
        for met in kernels[pair]:
            lacking.pop(met, None)
    return chosen
