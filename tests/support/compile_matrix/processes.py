"""Many pairs, in one process or in several.

Cases hold functions, which no process can send to another: each makes the list of pairs itself, from the same
selection, and is given numbers in it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch

from compile_matrix.covering import covering
from compile_matrix.pairs import CARDS, Pair, Result, all_pairs, look_at


@dataclass(frozen=True)
class Selection:
    """Which pairs to look at, and whether to compile them."""

    cards: tuple[str, ...]
    only: str = ""  # in the name of a case
    part: int = 1
    parts: int = 1
    cover: bool = False
    turns: bool = False
    compiles: bool = True

    def pairs(self) -> list[Pair]:
        cards = [CARDS[name] for name in self.cards]
        chosen = [pair for pair in all_pairs(cards, turns=self.turns) if self.only in pair.case.name]
        return (covering(chosen) if self.cover else chosen)[self.part - 1 :: self.parts]


def results(selection: Selection, processes: int) -> Iterator[Result]:
    """In the order of the pairs. A process that a compiler ends is an error, not a wait for ever."""
    work = [(selection, number) for number in range(len(_pairs(selection)))]
    if processes == 1:
        yield from map(_look_at, work)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_look_at, work)


@cache
def _pairs(selection: Selection) -> list[Pair]:
    torch.set_num_threads(1)
    return selection.pairs()


def _look_at(work: tuple[Selection, int]) -> Result:
    selection, number = work
    return look_at(_pairs(selection)[number], compiles=selection.compiles)
