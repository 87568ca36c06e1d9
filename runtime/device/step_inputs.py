"""The numbers of one step, from Python objects into one buffer that is copied to the device at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quantkit.runtime.core.step_plan import FROM_ROW, Scheduled, StepPlan


@dataclass
class StepInputs:
    """Plain lists."""

    # Of tokens.
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    kv_slots: list[int] = field(default_factory=list)  # where keys and values go: page * page_size + offset
    # Of sequences.
    rows: list[int] = field(default_factory=list)  # of the device's state
    contexts: list[int] = field(default_factory=list)  # tokens, the new ones included
    starts: list[int] = field(default_factory=lambda: [0])  # among the tokens; one more than sequences
    # Of samples.
    logits_rows: list[int] = field(default_factory=list)  # rows of the hidden states whose logits are wanted
    owner_rows: list[int] = field(default_factory=list)  # device rows of the sequences that they belong to
    # Of tokens, where there are trees: bits for the new tokens of the sequence that each sees
    # (`kernels/attention/attend.py`).
    ancestors: list[int] = field(default_factory=list)

    @property
    def num_new(self) -> list[int]:
        """New tokens of every sequence."""
        if self.one_each:
            return [1] * len(self.rows)
        return [after - before for before, after in zip(self.starts, self.starts[1:], strict=False)]

    @property
    def token_rows(self) -> list[int]:
        """Of every token, the row of its sequence."""
        if self.one_each:
            return self.rows
        return [row for row, count in zip(self.rows, self.num_new, strict=True) for _ in range(count)]

    @property
    def one_each(self) -> bool:
        """Whether every sequence has one new token."""
        return len(self.ids) == len(self.rows)

    @property
    def max_queries(self) -> int:
        return 1 if self.one_each else max(self.num_new)


@dataclass(frozen=True)
class Step:
    """A step for all ranks. `table_index` and `table_pages` are what changes in the page table; `all_tokens`: the
    hidden states of all tokens are wanted, not only of those behind which a token is sampled."""

    inputs: StepInputs
    table_index: list[int]
    table_pages: list[int]
    all_tokens: bool = False

    @property
    def wanted(self) -> list[int]:
        """Rows of the hidden states, that the first stage gets back."""
        return list(range(len(self.inputs.ids))) if self.all_tokens else self.inputs.logits_rows


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


_NOBODY = -1  # is no sequence's id


class TableChanges:
    """Remembers which page numbers the device has, so that only new ones travel."""

    def __init__(self, num_rows: int, table_width: int) -> None:
        self._width = table_width
        self._sent: list[list[int]] = [[] for _ in range(num_rows)]  # pages of every row, as the device knows them
        self._owners = [_NOBODY] * num_rows  # ids of the sequences that these belong to
        self._versions = [0] * num_rows  # of a sequence's pages: while it stays, none of them changes

    def of(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Flat index and page, where the page table must change for a step."""
        index: list[int] = []
        numbers: list[int] = []
        for work in plan.scheduled:
            sequence = work.sequence
            row, pages = sequence.row, sequence.pages
            version = sequence.num_preemptions + sequence.num_replaced  # which only grow
            if sequence.id == self._owners[row] and version == self._versions[row]:
                same = len(self._sent[row])
            else:
                same = self._unchanged(row, pages)
                self._owners[row], self._versions[row], self._sent[row] = sequence.id, version, pages[:same]
            if same < len(pages):
                index += range(row * self._width + same, row * self._width + len(pages))
                numbers += pages[same:]
                self._sent[row] += pages[same:]
        return index, numbers

    def forget(self) -> None:
        """Nobody knows what the device has: every row is sent whole when it is next needed."""
        self._sent = [[] for _ in self._sent]
        self._owners = [_NOBODY] * len(self._sent)

    def _unchanged(self, row: int, pages: list[int]) -> int:
        """As many as both know, where all of these are the same."""
        sent = self._sent[row]
        same = min(len(sent), len(pages))
        return same if sent[:same] == pages[:same] else 0


class InputMaker:
    """Makes the inputs of steps."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def make(self, plan: StepPlan) -> StepInputs:
        if not [work for work in plan.scheduled if work.num_tokens > 1 or not work.samples]:
            return self._answers(plan)
        inputs = StepInputs()
        size, trees = self._page_size, plan.has_trees
        for work in plan.scheduled:
            sequence, stop = work.sequence, work.start + work.num_tokens
            known = [*sequence.tokens[work.start : stop - len(work.draft)], *work.draft]
            inputs.ids += known
            inputs.ids += [FROM_ROW] * (work.num_tokens - len(known))
            inputs.positions += range(work.start, stop) if not work.parents else _tree_positions(work)
            if trees:
                inputs.ancestors += _ancestors(work)
            pages = sequence.pages
            inputs.kv_slots += [pages[at // size] * size + at % size for at in range(work.start, stop)]
            inputs.rows.append(sequence.row)
            inputs.contexts.append(stop)
            inputs.starts.append(inputs.starts[-1] + work.num_tokens)
            if work.samples:
                inputs.logits_rows += range(inputs.starts[-1] - 1 - len(work.draft), inputs.starts[-1])
                inputs.owner_rows += [sequence.row] * (len(work.draft) + 1)
        return inputs

    def _answers(self, plan: StepPlan) -> StepInputs:
        """Of a step in which every sequence has one new token, as in most steps."""
        size, count = self._page_size, len(plan.scheduled)
        sequences = [work.sequence for work in plan.scheduled]
        positions = [work.start for work in plan.scheduled]
        each = list(zip([one.tokens for one in sequences], [one.pages for one in sequences], positions, strict=True))
        rows = [one.row for one in sequences]
        return StepInputs(
            ids=[tokens[at] if at < len(tokens) else FROM_ROW for tokens, _, at in each],
            positions=positions,
            kv_slots=[pages[at // size] * size + at % size for _, pages, at in each],
            rows=rows,
            contexts=[at + 1 for at in positions],
            starts=list(range(count + 1)),
            logits_rows=list(range(count)),
            owner_rows=rows,
        )


def in_one(columns: Iterable[list[int]]) -> list[int]:
    """Columns behind each other, each of an even length, so that it begins on 16 bytes: Triton compiles a kernel again
    for pointers that do not."""
    numbers: list[int] = []
    for column in columns:
        numbers += column
        if len(column) % 2:
            numbers.append(0)
    return numbers


def _tree_positions(work: Scheduled) -> list[int]:
    """Guesses with the same number of guesses before them stand at the same position."""
    first = work.start + work.num_tokens - len(work.draft)
    return [*range(work.start, first), *(first - 1 + len(work.way_to(node)) for node in range(len(work.draft)))]


def _ancestors(work: Scheduled) -> list[int]:
    known = work.num_tokens - len(work.draft)
    below = [(2 << number) - 1 for number in range(known)]
    for node in range(len(work.draft)):
        below.append(below[known - 1] | sum(1 << (known + at) for at in work.way_to(node)))
    return below
