"""Pairs of a case and a card for one dtype: which there are, what one of them launches, what is wrong with that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from zlib import crc32

import torch

from compile_matrix.amd import AMD, AmdCard
from compile_matrix.case import Case
from compile_matrix.cases import all_cases
from compile_matrix.recorder import Launch, recording
from quantkit.kernels.card import KNOWN, Card, pretend

CARDS: dict[str, Card] = {**KNOWN, **AMD}
# Bytes a thread may spill.
MOST_STACK = {
    "_prefill": 256,  # prompts over 8-bit caches keep to 128 registers all the same
    "_eight_bit": 96,  # FP8 in blocks with activations of 16 bits, on sm_90
    "_decode": 96,  # heads of 96 with a soft cap over 8-bit caches on sm_100; no family has both
}
_STACK = 64  # for all others
_LITTLE_SHARED = 99 << 10  # bytes


@dataclass(frozen=True)
class Pair:
    card: Card
    dtype: torch.dtype
    case: Case

    def __str__(self) -> str:
        return f"{self.card.target} {str(self.dtype)[6:]} {self.case.name}"


@dataclass(frozen=True)
class Result:
    """Of one pair."""

    pair: str
    card: str
    tried: bool
    launches: list[Launch] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


def all_pairs(cards: list[Card], *, turns: bool = False) -> Iterator[Pair]:
    """What is slow, or what only the tuner tries, is compiled for bfloat16 alone; the latter not at all for AMD.

    `turns`, by the name of the case: what is slow, what the tuner tries, and float16, for one card; else, in bfloat16,
    for every card, but of those with little shared memory (sm_86, 89, 120), whose tiles are the same, for one.
    """
    small = [card for card in cards if card.shared <= _LITTLE_SHARED]
    for place, card in enumerate(cards):
        with pretend(card):
            cases = [case for case in all_cases(card) if not (case.tried and isinstance(card, AmdCard))]
        for case in cases:
            turn = crc32(case.name.encode())
            own_turn = turn % len(cards) == place
            rare = case.tried or case.slow
            among_small = card not in small or turn % len(small) == small.index(card)
            if not turns or (own_turn if rare else among_small):
                yield Pair(card, torch.bfloat16, case)
            if not rare and (own_turn or not turns):
                yield Pair(card, torch.float16, case)


def look_at(pair: Pair, *, compiles: bool = True) -> Result:
    """A launcher that refuses its arguments is a trouble, too."""
    troubles = []
    with recording(pair.card, compiles=compiles and not pair.case.grid_only) as launches:
        try:
            pair.case.launch(pair.dtype)
        except Exception as error:
            troubles.append(f"{pair}: {type(error).__name__}: {error}")
    for launch in launches:
        troubles += [f"{pair}: {launch.kernel} {trouble}" for trouble in _troubles(pair, launch)]
    return Result(str(pair), pair.card.target, pair.case.tried, launches, troubles)


def _troubles(pair: Pair, launch: Launch) -> list[str]:
    if pair.case.tried:  # what does not fit is passed by
        return [launch.error] if launch.error else []
    return list(launch.troubles(pair.card, MOST_STACK.get(launch.kernel, _STACK)))
