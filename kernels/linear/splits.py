"""Adding up what several programs computed for one tile, always in the same order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_in_order(acc, partial, tickets, split, splits, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(sum over all splits, True) in the program that arrives last, (anything, False) in the others.

    Each program stores its part and takes a ticket; the one that draws the last ticket reads all parts in the order of
    the splits, and sets the ticket back to 0 for the next call. Tiles are numbered by programs 0 and 1 of the grid.
    """
    last = True
    if splits > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        parts = partial + tile.to(tl.int64) * splits * (ROWS * COLUMNS)
        tl.store(parts + split * (ROWS * COLUMNS) + place, acc)
        tl.debug_barrier()  # every thread's part is stored before the ticket is taken
        ticket = tl.atomic_add(tickets + tile, 1, sem="acq_rel")
        last = ticket == splits - 1
        if last:
            tl.debug_barrier()
            acc = tl.load(parts + place, cache_modifier=".cg")
            for other in range(1, splits):
                acc += tl.load(parts + other * (ROWS * COLUMNS) + place, cache_modifier=".cg")
            tl.store(tickets + tile, 0)
    return acc, last
