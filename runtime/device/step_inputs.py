"""The numbers of one step, from Python objects into one buffer that is copied to the device at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from quantkit.runtime.core.step_plan import FROM_PLACE, Share, StepPlan


@dataclass
class StepInputs:
    """Plain lists. Of tokens: ids, positions, slots, and where there are trees, bits for the new tokens of the sequence
    that each sees (`kernels/attention/attend.py`). Of sequences: places, contexts, starts (one more than sequences).
    Of samples: rows of the hidden states, and places."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    rows: list[int] = field(default_factory=list)
    row_places: list[int] = field(default_factory=list)
    ancestors: list[int] = field(default_factory=list)

    @property
    def counts(self) -> list[int]:
        """New tokens of every sequence."""
        return [after - before for before, after in zip(self.starts, self.starts[1:], strict=False)]

    @property
    def max_queries(self) -> int:
        return max(self.counts, default=1)


@dataclass(frozen=True)
class Step:
    """A step for all ranks. `index` and `pages` are what changes in the page table; `every`: the hidden states of all
    tokens are wanted, not only of those behind which a token is sampled."""

    inputs: StepInputs
    index: list[int]
    pages: list[int]
    every: bool = False

    @property
    def rows(self) -> list[int]:
        """Of the hidden states, that the first stage gets back."""
        return list(range(len(self.inputs.ids))) if self.every else self.inputs.rows


@dataclass(frozen=True)
class PageMoves:
    """Pages that change hands before a step: out to the host, back from the host, copies. In this order, because a page
    that one gives another may take. Sequences go by their ids; what was kept of the `dropped` ones is not wanted."""

    dropped: list[int] = field(default_factory=list)
    out: list[tuple[int, list[int]]] = field(default_factory=list)
    back: list[tuple[int, list[int]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # from page, to page

    def __bool__(self) -> bool:
        return bool(self.dropped or self.out or self.back or self.copies)


class TableChanges:
    """Remembers which page numbers the device has, so that only new ones travel."""

    def __init__(self, places: int, table_width: int) -> None:
        self._width = table_width
        self._sent: list[list[int]] = [[] for _ in range(places)]  # pages of every place, as the device knows them

    def of(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Flat index and page, where the page table must change for a step."""
        index: list[int] = []
        numbers: list[int] = []
        for share in plan.shares:
            place, pages = share.sequence.slot, share.sequence.pages
            same = self._unchanged(place, pages)
            if same < len(pages):
                index += range(place * self._width + same, place * self._width + len(pages))
                numbers += pages[same:]
                self._sent[place] = list(pages)
        return index, numbers

    def _unchanged(self, place: int, pages: list[int]) -> int:
        """Pages are replaced or appended at the end, so the last one that both know tells how much is the same."""
        sent = self._sent[place]
        same = min(len(sent), len(pages))
        return same if sent[:same] == pages[:same] else 0


class InputMaker:
    """Makes the inputs of steps."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def make(self, plan: StepPlan) -> StepInputs:
        inputs = StepInputs()
        size, trees = self._page_size, plan.has_trees
        for share in plan.shares:
            sequence, stop = share.sequence, share.start + share.count
            known = [*sequence.tokens[share.start : stop - len(share.draft)], *share.draft]
            inputs.ids += known
            inputs.ids += [FROM_PLACE] * (share.count - len(known))
            inputs.positions += range(share.start, stop) if not share.parents else _tree_positions(share)
            if trees:
                inputs.ancestors += _ancestors(share)
            pages = sequence.pages
            inputs.slots += [pages[at // size] * size + at % size for at in range(share.start, stop)]
            inputs.places.append(sequence.slot)
            inputs.contexts.append(stop)
            inputs.starts.append(inputs.starts[-1] + share.count)
            if share.samples:
                inputs.rows += range(inputs.starts[-1] - 1 - len(share.draft), inputs.starts[-1])
                inputs.row_places += [sequence.slot] * (len(share.draft) + 1)
        return inputs


def _tree_positions(share: Share) -> list[int]:
    """Guesses with the same number of guesses before them stand at the same position."""
    first = share.start + share.count - len(share.draft)
    return [*range(share.start, first), *(first - 1 + len(share.way_to(node)) for node in range(len(share.draft)))]


def _ancestors(share: Share) -> list[int]:
    known = share.count - len(share.draft)
    below = [(2 << number) - 1 for number in range(known)]
    for node in range(len(share.draft)):
        below.append(below[known - 1] | sum(1 << (known + at) for at in share.way_to(node)))
    return below
