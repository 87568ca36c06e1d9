"""Few pairs in which every kernel meets every card, and every dtype: what can be compiled in every run of the tests."""

from __future__ import annotations

from collections import defaultdict

import torch

from compile_matrix.case import HALVES
from compile_matrix.pairs import Pair, look_at
from pairwise import cover


def covering(pairs: list[Pair]) -> list[Pair]:
    """Of the pairs that launch a kernel, another one for every card, so that configurations differ, too; those that
    launch further kernels that the card still lacks come first."""
    launching: dict[tuple[str, str, torch.dtype], list[Pair]] = defaultdict(list)
    kernels: dict[Pair, set[str]] = {}
    for pair in pairs:
        if not (pair.case.tried or pair.case.grid_only or pair.case.slow):
            kernels[pair] = {launch.kernel for launch in look_at(pair, compiles=False).launches}
            for kernel in kernels[pair]:
                launching[kernel, pair.card.target, pair.dtype].append(pair)
    cards = dict.fromkeys(pair.card.target for pair in pairs)
    every = sorted({kernel for kernel, *_ in launching})
    rows = cover(every, cards, HALVES)
    chosen: dict[Pair, None] = {}
    met: set[tuple[str, object]] = set()  # a kernel, and the card or dtype that it was compiled for
    for option in (1, 2):  # cards first: dtypes are then met by the way, almost all
        for number, row in enumerate(rows):
            candidates = launching[row]
            if candidates and (row[0], row[option]) not in met:
                first = number % len(candidates)
                rest = [*candidates[first:], *candidates[:first]]
                lacking = {kernel for kernel in every if (kernel, row[1]) not in met}
                pair = max(rest, key=lambda pair: len(kernels[pair] & lacking))
                chosen[pair] = None
                met |= {(kernel, of) for kernel in kernels[pair] for of in row[1:]}
    return list(chosen)
