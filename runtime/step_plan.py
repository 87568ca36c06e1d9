"""What one step computes, as the scheduler decides it and the runner does it."""

from __future__ import annotations

from dataclasses import dataclass, field

from quantkit.runtime.sequence import Sequence


@dataclass(frozen=True)
class Share:
    """The part of one sequence in a step: `count` tokens from position `start`; the last one's successor is sampled
    where `samples` is set. The last ones may be a `draft`: guesses, behind each of which a token is sampled too."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    draft: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """What one step computes. Pages are moved first: out to the host, back from it, then copies."""

    shares: list[Share]
    copies: list[tuple[int, int]] = field(default_factory=list)  # from page, to page
    preempted: list[Sequence] = field(default_factory=list)
    swap_out: list[tuple[Sequence, list[int]]] = field(default_factory=list)  # these pages to host memory
    swap_in: list[tuple[Sequence, list[int]]] = field(default_factory=list)  # into these pages

    def settled(self, sequence: Sequence) -> int:
        """Tokens of a sequence that earlier steps computed."""
        for share in self.shares:
            if share.sequence is sequence:
                return share.start
        return sequence.computed

    @property
    def tokens(self) -> int:
        return sum(share.count for share in self.shares)

    @property
    def decodes_only(self) -> bool:
        return all(share.count == 1 and share.samples for share in self.shares)
