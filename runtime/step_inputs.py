"""The numbers of one step, from Python objects into one buffer that is copied to the device at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from quantkit.runtime.step_plan import StepPlan

FROM_PLACE = -1  # instead of a token that has not come back from the device: it is in the sequence's place there


@dataclass
class StepInputs:
    """Plain lists. Of tokens: ids, positions, slots. Of sequences: places, contexts, starts (one more than sequences).
    Of samples: rows of the hidden states, and places. Of the page table: flat index and page, where it has changed."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    rows: list[int] = field(default_factory=list)
    row_places: list[int] = field(default_factory=list)
    table_index: list[int] = field(default_factory=list)
    table_pages: list[int] = field(default_factory=list)

    @property
    def max_queries(self) -> int:
        return max((after - before for before, after in zip(self.starts, self.starts[1:], strict=False)), default=1)


class InputMaker:
    """Makes the inputs of steps. Remembers which page numbers the device has, so that only new ones travel."""

    def __init__(self, places: int, table_width: int, page_size: int) -> None:
        self._width = table_width
        self._page_size = page_size
        self._sent: list[list[int]] = [[] for _ in range(places)]  # pages of every place, as the device knows them

    def make(self, plan: StepPlan) -> StepInputs:
        inputs = StepInputs()
        size = self._page_size
        for share in plan.shares:
            sequence, stop = share.sequence, share.start + share.count
            known = [*sequence.tokens[share.start : stop - len(share.draft)], *share.draft]
            inputs.ids += known
            inputs.ids += [FROM_PLACE] * (share.count - len(known))
            inputs.positions += range(share.start, stop)
            pages = sequence.pages
            inputs.slots += [pages[at // size] * size + at % size for at in range(share.start, stop)]
            inputs.places.append(sequence.slot)
            inputs.contexts.append(stop)
            inputs.starts.append(inputs.starts[-1] + share.count)
            if share.samples:
                inputs.rows += range(inputs.starts[-1] - 1 - len(share.draft), inputs.starts[-1])
                inputs.row_places += [sequence.slot] * (len(share.draft) + 1)
            self._update_table(inputs, sequence.slot, pages)
        return inputs

    def _update_table(self, inputs: StepInputs, place: int, pages: list[int]) -> None:
        """Pages are replaced or appended at the end, so the last one that both know tells how much is the same."""
        sent = self._sent[place]
        same = min(len(sent), len(pages))
        if sent[:same] != pages[:same]:
            same = 0
        if same < len(pages):
            start = place * self._width
            inputs.table_index += range(start + same, start + len(pages))
            inputs.table_pages += pages[same:]
            self._sent[place] = list(pages)
