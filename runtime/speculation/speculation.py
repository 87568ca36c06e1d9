"""Speculative decoding: tokens are guessed, and one step verifies several at once.

A draft of k guesses goes into a step behind the last known token. The target samples a token behind each of them, with
the random numbers of that position, as it would have done one by one. As far as the guesses are what was sampled, they
are the answer; the first that is not gives way to the sampled token, and everything behind it was never there. So
answers are those of plain decoding, token for token, whatever is guessed; a guess x survives with the target's p(x).

A sequence that speculates must know its last token before the next step, so it gives up the overlap of steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from quantkit.errors import InputError, did_you_mean
from quantkit.runtime.runner import Outcome
from quantkit.runtime.sequence import Sequence
from quantkit.runtime.step_plan import StepPlan

MOST_GUESSES = 16
_DEFAULTS = {"ngram": 8, "draft": 4}  # kind -> guesses
_EXAMPLES = "such as ngram,k=8 or draft=PATH,k=4"


class Drafter(Protocol):
    """Where guesses come from."""

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """Up to so many tokens that may follow; empty where there is no good guess."""

    def complete(self, plan: StepPlan) -> None:
        """The step as it is planned: the last moment to change what is guessed, in drafts of the same length."""

    def see(self, outcome: Outcome) -> None:
        """How a sequence's guesses did, before its tokens become known."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""


@dataclass(frozen=True)
class SpeculativeOptions:
    """What `--speculative` says."""

    kind: str  # of _DEFAULTS
    most: int  # guesses in one step
    path: str | None = None  # of a draft model

    @classmethod
    def parse(cls, text: str) -> SpeculativeOptions:
        """From `ngram`, `ngram,k=8` or `draft=PATH,k=4`."""
        first, *rest = (part.strip() for part in text.split(","))
        kind, _, path = first.partition("=")
        if kind not in _DEFAULTS:
            raise InputError(f"speculative is '{text}', {_EXAMPLES}: {did_you_mean(kind, _DEFAULTS)}")
        if (kind == "draft") != bool(path):
            raise InputError(f"speculative is '{text}', but must be {_EXAMPLES}")
        most = _DEFAULTS[kind]
        for part in rest:
            name, _, value = part.partition("=")
            if name != "k":
                raise InputError(f"speculative is '{text}': unknown setting '{name}'; known: k")
            if not value.isdecimal() or not 1 <= int(value) <= MOST_GUESSES:
                raise InputError(f"speculative is '{text}': k must be a whole number from 1 to {MOST_GUESSES}")
            most = int(value)
        return cls(kind, most, path or None)


class Speculation:
    """Guesses for those who answer, and how good they were. Without a drafter, nobody speculates."""

    def __init__(self, drafter: Drafter | None = None, most: int = 0) -> None:
        self._drafter = drafter
        self._most = most
        self.steps = 0  # in which a draft was verified, counted for each sequence
        self.guessed = 0  # tokens
        self.accepted = 0  # of these
        self.saved_seconds = 0.0  # against decoding token by token, as far as the cost of steps is known

    @property
    def on(self) -> bool:
        return self._drafter is not None

    def serves(self, sequence: Sequence) -> bool:
        """Whether a sequence may speculate. Where logits depend on the tokens before, guesses would change them."""
        return self._drafter is not None and sequence.guide is None and not sequence.params.shapes_logits

    def propose(self, running: Iterable[Sequence]) -> None:
        """Drafts for all that wait for their next token only."""
        if self._drafter is None:
            return
        for sequence in running:
            sequence.draft = []
            if sequence.speculates and not sequence.must_wait and sequence.length - sequence.computed == 1:
                left = sequence.max_new - len(sequence.answer) - 1  # the token behind the draft is one too
                if left > 0:
                    sequence.draft = self._drafter.guess(sequence, min(self._most, left))

    def complete(self, plan: StepPlan) -> None:
        if self._drafter is not None:
            self._drafter.complete(plan)

    def see(self, outcome: Outcome) -> None:
        if self._drafter is not None and outcome.share.sequence.speculates:
            self._drafter.see(outcome)
        if outcome.share.draft:
            sequence, guessed = outcome.share.sequence, len(outcome.share.draft)
            self.steps += 1
            self.guessed += guessed
            self.accepted += outcome.accepted
            sequence.guessed += guessed
            sequence.accepted += outcome.accepted

    def forget(self, sequence: Sequence) -> None:
        if self._drafter is not None:
            self._drafter.forget(sequence)
