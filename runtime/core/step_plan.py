"""What one step computes, as the scheduler decides it and the runner does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from quantkit.runtime.core.sequence import Sequence

MOST_GUESSES = 16  # in one step, for one sequence
FROM_ROW = -1  # instead of a token that has not come back from the device: it is in the sequence's row there


def guess_in_row(number: int) -> int:
    """Instead of a guess that only the device knows, the first of which has the number 0."""
    return FROM_ROW - 1 - number


class Scheduled(NamedTuple):
    """A sequence's part of a step: `num_tokens` tokens from position `start`; the last one's successor is sampled where
    `samples` is set. The last ones may be a `draft`: guesses, behind each of which a token is sampled too.

    The guesses follow each other, or are the nodes of a tree: then `parents` has, for each of them, the number of the
    guess in front of it, which comes before it, or -1 for those right behind the known tokens.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    draft: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def way_to(self, node: int) -> list[int]:
        """The guesses from the first one to this, by number."""
        if not self.parents:
            return list(range(node + 1))
        way: list[int] = []
        while node >= 0:
            way.append(node)
            node = self.parents[node]
        return way[::-1]

    def guesses_before_rows(self) -> list[tuple[int, ...]]:
        """Of the row of the last known token and of each guess: the guesses up to it."""
        return [(), *(tuple(self.draft[at] for at in self.way_to(node)) for node in range(len(self.draft)))]


@dataclass(frozen=True)
class StepPlan:
    """What one step computes. Pages are moved first: out to the host, back from it, then copies.

    The scheduler makes it. Nobody changes one that it has returned: a drafter on the device and speculation itself
    return another, with guesses and with coins.
    """

    scheduled: list[Scheduled]
    copies: list[tuple[int, int]] = field(default_factory=list)  # from page, to page
    preempted: list[Sequence] = field(default_factory=list)
    swap_out: list[tuple[Sequence, list[int]]] = field(default_factory=list)  # these pages to host memory
    swap_in: list[tuple[Sequence, list[int]]] = field(default_factory=list)  # into these pages
    coins: list[bool] = field(default_factory=list)  # for benchmarks, of each sampled row: its guess counts as right
    proposals: dict[int, Tensor] = field(default_factory=dict)  # sequence -> logits its guesses were drawn from

    def settled(self, sequence: Sequence) -> int:
        """Tokens of a sequence that earlier steps computed."""
        for work in self.scheduled:
            if work.sequence is sequence:
                return work.start
        return sequence.num_computed

    @property
    def tokens(self) -> int:
        return sum(work.num_tokens for work in self.scheduled)

    def without_trees(self) -> StepPlan:
        """Trees become chains of the same length: beside prompts, attention knows no trees."""
        return replace(self, scheduled=[work._replace(parents=()) if work.parents else work for work in self.scheduled])

    def with_guesses(self, drafts: Mapping[int, tuple[int, ...]], proposals: Mapping[int, Tensor]) -> StepPlan:
        """By sequence id: guesses that the host must know, and the logits that guesses were drawn from."""
        if not drafts and not proposals:
            return self
        scheduled = self.scheduled
        if drafts:
            scheduled = [work._replace(draft=drafts.get(work.sequence.id, work.draft)) for work in scheduled]
        return replace(self, scheduled=scheduled, proposals=dict(proposals))

    @cached_property
    def has_trees(self) -> bool:
        """Asked for when all is scheduled."""
        return bool([work for work in self.scheduled if work.parents])

    @property
    def answers_only(self) -> bool:
        """Whether every part is the last known token of a sequence, and guesses behind it."""
        return all(work.samples and work.num_tokens == 1 + len(work.draft) for work in self.scheduled)
