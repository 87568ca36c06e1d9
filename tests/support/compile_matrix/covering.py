"""Few pairs in which every kernel is compiled for a card before Hopper and for one since, all cards and both dtypes in
turn: what every run of the tests can pay for."""

from __future__ import annotations

from collections import defaultdict

import torch

from compile_matrix.case import HALVES
from compile_matrix.pairs import Pair, look_at
from quantkit.kernels.card import Card

_Group = str
_SINCE, _BEFORE = "since Hopper", "before"


def covering(pairs: list[Pair]) -> list[Pair]:
    """Of the pairs that launch a kernel, one that launches most of the kernels which its group of cards still lacks."""
    launching: dict[tuple[str, str, torch.dtype], list[Pair]] = defaultdict(list)
    groups: dict[_Group, dict[str, None]] = {_BEFORE: {}, _SINCE: {}}
    kernels: dict[Pair, set[str]] = {}
    for pair in pairs:
        if not (pair.case.tried or pair.case.grid_only or pair.case.slow):
            groups[_group(pair.card)][pair.card.target] = None
            kernels[pair] = {launch.kernel for launch in look_at(pair, compiles=False).launches}
            for kernel in kernels[pair]:
                launching[kernel, pair.card.target, pair.dtype].append(pair)
    every = sorted({kernel for kernel, *_ in launching})
    chosen: list[Pair] = []
    met: set[tuple[str, _Group]] = set()
    for number, kernel in enumerate(every):
        for group, cards in groups.items():
            able = [(card, dtype) for card in cards for dtype in HALVES if (kernel, card, dtype) in launching]
            if able and (kernel, group) not in met:
                candidates = launching[kernel, *able[(len(chosen) + number) % len(able)]]
                first = number % len(candidates)
                lacking = {other for other in every if (other, group) not in met}
                pair = max([*candidates[first:], *candidates[:first]], key=lambda pair: len(kernels[pair] & lacking))
                chosen.append(pair)
                met |= {(other, group) for other in kernels[pair]}
    return chosen


def _group(card: Card) -> _Group:
    return _SINCE if card.capability >= (9, 0) else _BEFORE
