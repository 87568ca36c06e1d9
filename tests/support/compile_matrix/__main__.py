"""`python -m compile_matrix`: compiles every case for every card, and says what does not assemble, fit, or stay in
registers. `--part K/N` takes every N-th pair of a case and a card, so that few pairs still see every card.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator

import torch

from compile_matrix.cases import HALVES, Case, all_cases
from compile_matrix.recorder import Launch, compiling_for
from quantkit.kernels.card import KNOWN, Card, pretend

MOST_STACK = {"_prefill": 256}  # bytes a thread may spill; prompts over 8-bit caches keep to 128 registers all the same
_STACK = 64  # for all others


def pairs(cards: list[Card]) -> Iterator[tuple[Card, torch.dtype, Case]]:
    """What only the tuner tries is compiled for bfloat16 alone."""
    for card in cards:
        with pretend(card):
            cases = list(all_cases(card))
        for dtype in HALVES:
            yield from ((card, dtype, case) for case in cases if not case.tried or dtype == torch.bfloat16)


def troubles(card: Card, case: Case, launch: Launch) -> list[str]:
    if case.tried:  # what does not fit is passed by
        return [launch.error] if launch.error else []
    return list(launch.troubles(card, MOST_STACK.get(launch.kernel, _STACK)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cards", default=",".join(KNOWN), metavar="SM_80,...")
    parser.add_argument("--part", default="1/1", metavar="K/N")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    began, launched, found = time.perf_counter(), Counter[str](), []
    chosen = [pair for pair in pairs([KNOWN[name] for name in given.cards.split(",")]) if given.only in pair[2].name]
    for card, dtype, case in chosen[part - 1 :: parts]:
        with compiling_for(card) as launches:
            case.launch(dtype)
        for launch in launches:
            launched[launch.kernel] += 1
            what = f"{card.target} {str(dtype)[6:]} {case.name}: {launch.kernel}"
            found += [f"{what} {trouble}" for trouble in troubles(card, case, launch)]
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"pairs": len(chosen), "launches": launched, "seconds": seconds, "troubles": found}, indent=1))


if __name__ == "__main__":
    main()
