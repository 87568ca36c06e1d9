"""Pairwise covers: few cases in which any two values of two different options still meet.

Most mistakes need one value or two that meet, so a cover finds what a full product finds in a fraction of its time:

    from pairwise import cover
    @pytest.mark.parametrize(("family", "bits", "page"), cover(FAMILIES, (4, 8), (16, 32)))

Three options of 7, 2 and 2 values are 28 cases as a product and 14 as a cover. The same arguments give the same cases.
"""

from collections.abc import Iterable
from itertools import combinations
from typing import Any

Cell = tuple[int, int]  # (option, number of its value)


def cover(*options: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value from each option; every pair of values of two options is in at least one row."""
    values = [list(option) for option in options]
    if len(values) < 2 or not all(values):
        raise ValueError("a pairwise cover needs two options or more, each with a value")
    cells = [[(option, number) for number in range(len(own))] for option, own in enumerate(values)]
    left = {(a, b): None for one, other in combinations(cells, 2) for a in one for b in other}  # a dict keeps its order
    rows = []
    while left:
        row = _row(cells, left)
        for pair in combinations(row, 2):
            left.pop(pair, None)
        rows.append(tuple(values[option][number] for option, number in row))
    return rows


def _row(cells: list[list[Cell]], left: dict[tuple[Cell, Cell], None]) -> list[Cell]:
    """Begins with the first pair that is left; each further option takes the value with most pairs left in the row."""
    row = dict(next(iter(left)))
    for own in cells:
        if own[0][0] not in row:
            best = max(own, key=lambda cell: sum(tuple(sorted((cell, seen))) in left for seen in row.items()))
            row[best[0]] = best[1]
    return sorted(row.items())
