"""`python -m compile_matrix`: compiles every case for every card, and says what does not assemble, fit, or stay in
registers. JSON on stdout, with `--table` a table for readers on stderr.

`--part K/N` takes every N-th pair of a case and a card, so that few pairs still see every card. `--list` compiles
nothing: which kernels are launched, and whether their grids exist. `--cover` takes few pairs that have every
kernel; `--turns` leaves what only the tuner tries to one card, float16 and what is slow to every third. A second run is
quick: Triton keeps what it compiled (`recorder.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from compile_matrix.pairs import CARDS
from compile_matrix.processes import Selection, results
from compile_matrix.report import Report
from quantkit.kernels.card import KNOWN

_EVERY = 250  # pairs between two words about how far it is


def main() -> None:
    parser = argparse.ArgumentParser(prog="compile_matrix")
    parser.add_argument("--cards", default=",".join(KNOWN), help=f"of {', '.join(CARDS)}; all of NVIDIA's if not given")
    parser.add_argument("--part", default="1/1", metavar="K/N")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--cover", action="store_true", help="few pairs that have every kernel, for all cards in turn")
    parser.add_argument("--turns", action="store_true", help="cards take turns with what is rare or slow")
    parser.add_argument("--list", action="store_true", help="launches and their grids, nothing compiled")
    parser.add_argument("--table", action="store_true", help="what was found as a table, on stderr")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    cards = tuple(given.cards.split(","))
    selection = Selection(cards, given.only, part, parts, given.cover, given.turns, not given.list)
    began, report = time.perf_counter(), Report(given.processes)
    for number, result in enumerate(results(selection, given.processes), start=1):
        report.add(result)
        if number % _EVERY == 0:
            print(f"{number} pairs, {len(report.troubles)} troubles", file=sys.stderr, flush=True)
    report.seconds = time.perf_counter() - began
    print(json.dumps(report.as_json(), indent=1))
    if given.table:
        print(report.as_table(), file=sys.stderr)


if __name__ == "__main__":
    main()
