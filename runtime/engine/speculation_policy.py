"""How many tokens to guess for whom: as many as pay, and none where a step with guesses costs more than it brings.

Of k guesses that are each right with probability a, a step brings 1 + a + ... + a**k tokens. Steps with k guesses are
compared by tokens in a second for the sequences that run now; `step_costs.py` knows what they cost, and every sequence
knows how good its guesses were lately. A sequence whose next guess brings less than the row costs gets a shorter draft.

With many sequences a step is bound by arithmetic, and guesses cost as much as tokens: then nobody speculates, and steps
overlap as they do without speculation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.device.decode_graphs import DRAFT_LENGTHS
from quantkit.runtime.engine.step_costs import Costs

_GAIN = 1.02  # that guessing must promise; less is noise
_PROBE = 128  # plain steps, at least, after which guesses are tried again, where they could pay
_LONGEST_PAUSE = 1024
_PRICE = 0.01  # of the time, at most, that such trials take
_TRIED = 3  # drafts of a sequence that are then verified
_SAMPLE = 8  # sequences that are tried: a draft model must read all that each of them said meanwhile
_LOOK = 8  # plain steps from one look at the costs to the next
_HOPE = 0.9  # the acceptance with which they could
_FADING = 0.95  # per step: what happened 60 steps ago counts one twentieth


@dataclass(frozen=True)
class _Record:
    """How guesses did, the latest counting most. It begins with what others saw."""

    right: float = 1.4
    tested: float = 2.0
    offered: float = 1.0  # share of steps for which there was a guess

    @property
    def acceptance(self) -> float:
        return min(self.right / self.tested, 0.99)

    def after(self, guessed: int, accepted: int) -> _Record:
        """Guesses behind the first wrong one were not tested."""
        offered = self.offered * _FADING + (1 - _FADING) * (guessed > 0)
        if not guessed:
            return replace(self, offered=offered)
        tested = accepted + (accepted < guessed)
        return _Record(self.right * _FADING + accepted, self.tested * _FADING + tested, offered)


class Policy:
    def __init__(self, most: int, costs: Costs, adaptive: bool = True, alike: bool = False) -> None:
        """`alike`: all get the same number. So do nodes of a tree, whose worth does not fall as that of a chain, and
        steps that are CUDA graphs, which cost what the longest draft costs: shorter ones would save nothing."""
        self._alike = alike
        self.most = most
        self.costs = costs
        shorter = [length for length in DRAFT_LENGTHS if length < most] if adaptive else []
        self.candidates = [*shorter, most]
        self._adaptive = adaptive
        self._everybody = _Record()
        self._records: dict[int, _Record] = {}
        self._plain_steps = 0
        self._quiet = 0  # of these, until costs are looked at again
        self._to_try = 0  # drafts, though they did not pay lately

    def lengths(self, answering: list[Sequence]) -> dict[int, int]:
        """Guesses for each sequence of a step, by its id; empty where nobody should guess."""
        if not answering:
            return {}
        if not self._adaptive:
            return {sequence.id: self.most for sequence in answering}
        if self._quiet and self._to_try == 0:
            self._quiet -= 1
            self._plain_steps += 1
            return {}
        records = [self._record(sequence) for sequence in answering]
        best = self._best(len(answering), records)
        if best == 0 and self._plain_steps >= self._pause(len(answering)):
            hope = [replace(record, right=_HOPE, tested=1.0, offered=1.0) for record in records]
            self._plain_steps = 0
            if self._best(len(answering), hope):
                self.forget_everybody()
                self._to_try = _TRIED * min(len(answering), _SAMPLE)
        if best == 0 and self._to_try == 0:
            self._plain_steps += 1
            self._quiet = _LOOK - 1 if self.costs.estimate(len(answering), 0) is not None else 0
            return {}
        if best == 0:
            return {one.id: 1 for one in answering[:_SAMPLE]}
        return {one.id: self._own(record, best, len(answering)) for one, record in zip(answering, records, strict=True)}

    def see(self, sequence: Sequence, guessed: int, accepted: int) -> None:
        self._to_try = max(0, self._to_try - 1)
        self._records[sequence.id] = self._record(sequence).after(guessed, accepted)
        self._everybody = self._everybody.after(guessed, accepted)

    def forget(self, sequence: Sequence) -> None:
        self._records.pop(sequence.id, None)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Within, nothing is learned from guesses."""
        known = self._everybody, self._plain_steps, self._quiet, self._to_try
        try:
            yield
        finally:
            self._everybody, self._plain_steps, self._quiet, self._to_try = known

    def forget_everybody(self) -> None:
        """How guesses did, not what steps cost. A trial begins so: what is old would outweigh the little it brings."""
        self._records.clear()
        self._everybody = _Record()

    def _record(self, sequence: Sequence) -> _Record:
        """A new one begins with what the others' guesses are worth, and soon has its own."""
        known = self._records.get(sequence.id)
        if known is None:
            everybody = self._everybody
            known = _Record(2.0 * everybody.acceptance, 2.0, everybody.offered)
        return known

    def _best(self, sequences: int, records: list[_Record]) -> int:
        """The number of guesses with the most tokens in a second; 0: plain steps have more."""
        plain = self.costs.estimate(sequences, 0)
        if plain is None:
            return 0  # one plain step first
        best, rate = 0, _GAIN * sequences / plain
        for guesses in self.candidates:
            seconds = self.costs.estimate(sequences, guesses)
            assert seconds is not None
            tokens = sum(_tokens(record, guesses) for record in records)
            if tokens / seconds > rate:
                best, rate = guesses, tokens / seconds
        return best

    def _pause(self, sequences: int) -> float:
        """Plain steps from one trial to the next."""
        plain, tried = self.costs.estimate(sequences, 0), self.costs.estimate(sequences, 1)
        if not plain or tried is None:
            return _PROBE
        return min(max(_PROBE, _TRIED * (tried / plain - 1) / _PRICE), _LONGEST_PAUSE)

    def _own(self, record: _Record, most: int, sequences: int) -> int:
        """The part of a draft that pays for its rows; a first guess always keeps the record fresh."""
        if self._alike:
            return most
        plain, seconds = self.costs.estimate(sequences, 0), self.costs.estimate(sequences, most)
        assert plain is not None
        assert seconds is not None
        worth = (seconds - plain) / (plain * most)  # tokens that a row must bring
        length = 1
        while length < most and record.acceptance ** (length + 1) >= worth:
            length += 1
        return length


def _tokens(record: _Record, guesses: int) -> float:
    """Expected from a step."""
    a = record.acceptance
    return 1 + record.offered * a * (1 - a**guesses) / (1 - a)
