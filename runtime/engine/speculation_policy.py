"""How many tokens to guess for whom: as many as pay, and none where a step with guesses costs more than it brings.

Of k guesses that are each right with probability a, a step brings 1 + a + ... + a**k tokens. Steps with k guesses are
compared by tokens in a second for the sequences that run now; `step_costs.py` knows what they cost, and every sequence
knows how good its guesses were lately. A sequence whose next guess brings less than the row costs gets a shorter draft.

Nobody knows whether guesses are right before some were made, and guesses that are wrong cost time. So there are plain
times and times with guesses, and a budget (`loss_budget.py`) between them:

    plain     steps overlap as they do without speculation. It ends when what is known says that guesses pay, or when
              the budget holds what a look costs and the best guesses would pay. Such looks become rare where they find
              nothing.
    guessing  as many as pay by what was seen. While little was seen, and the budget lasts, it goes on where a little
              luck would make it pay. It ends when nothing speaks for it any longer.

What a draft model has to read before its first guess belongs to the price: a look asks as few sequences as make it
cheapest, and the others follow when that pays back while they last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.step_plan import MOST_GUESSES
from quantkit.runtime.device.decode_graphs import DRAFT_LENGTHS
from quantkit.runtime.engine.loss_budget import MOST_GAINED, LossBudget
from quantkit.runtime.engine.step_costs import Costs

_GAIN = 1.02  # that guessing must promise before it begins; less is noise
_PAUSE = 128  # plain steps, at least, from a look that found nothing to the next
_LONGEST_PAUSE = 2048
_SWITCH = 0.3  # plain steps that are lost where guessing begins: the host's work, which overlapped before
_TESTS = 8  # guesses that a look should see
_HORIZON = 128  # steps in which what a draft reads must pay back
_LOOK = 8  # plain steps from one look at the costs to the next
_HOPE = 0.9  # the acceptance with which guesses could pay
_DOUBT = 1.0  # plain steps that may be owed where nobody knows yet what steps with guesses take
_LUCK = 0.5  # of that, what a single test leaves open
_FADING = 0.97  # per step: what happened 100 steps ago counts one twentieth


@dataclass(frozen=True)
class _Record:
    """How guesses did, the latest counting most. It begins with little: half right of a single one."""

    right: float = 0.5
    tested: float = 1.0
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
    def __init__(
        self,
        most: int,
        costs: Costs,
        adaptive: bool = True,
        alike: bool = False,
        unread: Callable[[Sequence], int] = lambda sequence: 0,
        deepest: int = MOST_GUESSES,
    ) -> None:
        """`alike`: all get the same number. So do nodes of a tree, whose worth does not fall as that of a chain, and
        steps that are CUDA graphs, which cost what the longest draft costs: shorter ones would save nothing. `unread`:
        tokens of a sequence that the drafter must read before it guesses. `deepest`: guesses that a step may accept,
        where they are a tree."""
        self._alike = alike
        self.most = most
        self.costs = costs
        shorter = [length for length in DRAFT_LENGTHS if length < most] if adaptive else []
        self.candidates = [*shorter, most]
        self._adaptive = adaptive
        self._unread = unread
        self._deepest = deepest
        self._quiet = 0  # plain steps until costs are looked at again
        self.forget_everybody()

    @property
    def reads_prompts(self) -> bool:
        """Whether a drafter should read prompts as they come: unless guesses were found not to pay, or could not."""
        return self._guessing or not (self._failed or self._hopeless) or not self._adaptive

    def forget_everybody(self) -> None:
        """How guesses did, not what steps cost."""
        self._records: dict[int, _Record] = {}
        self._everybody = _Record()
        self._budget = LossBudget()
        self._guessing = False
        self._tried: set[int] = set()  # sequences that guesses were asked for since guessing began
        self._hopeless = False  # not even the best guesses would pay
        self._failed = 0  # looks that found nothing, in a row
        self._undecided = False  # whether the last look ended because the budget did
        self._dearest = 0.0  # plain steps that were lost in one of its steps
        self._plain_steps = 0  # since the last

    def lengths(self, answering: list[Sequence]) -> dict[int, int]:
        """Guesses for each sequence of a step, by its id; empty where nobody should guess."""
        if not answering:
            return {}
        if not self._adaptive:
            return {sequence.id: self.most for sequence in answering}
        if self._quiet:
            self._quiet -= 1
            self._plain_steps += 1
            return {}
        if not self.costs.has_plain:
            return {}  # that first
        found = self._more_guesses(answering) if self._guessing else self._first_guesses(answering)
        if not found:
            self._plain_steps += 1
            self._quiet = _LOOK - 1
        return found

    def _first_guesses(self, answering: list[Sequence]) -> dict[int, int]:
        """After plain steps."""
        count = len(answering)
        best, gain = self._best(count, [self._record(sequence) for sequence in answering])
        if gain < 1 or self._budget.left <= 0 or not self._pays_for_all(answering):
            pause = min(_PAUSE << max(0, self._failed - 1), _LONGEST_PAUSE) if self._failed else 0
            if self._plain_steps < pause:
                return {}
            hope = [_Record(_HOPE, 1.0)] * count
            gain = self._best(count, hope)[1]
            asked, price = self._cheapest_look(answering)
            self._hopeless = gain < _GAIN
            if self._hopeless or max(price, self._dearest) > self._budget.left or not self._pays_back(answering, gain):
                return {}
            if not self._undecided:
                self._records.clear()
                self._everybody = _Record()
            answering, best = asked, self._best(count, [self._everybody] * count)[0]
            self._dearest = 0.0
            self._budget.begin_look(price)
        self._guessing = True
        self._tried = {sequence.id for sequence in answering}
        return {sequence.id: best for sequence in answering}

    def _more_guesses(self, answering: list[Sequence]) -> dict[int, int]:
        count = len(answering)
        seen = [one for one in answering if one.id in self._tried or self._unread(one) <= _TESTS]
        records = [self._record(sequence) for sequence in answering]
        best, gain = self._best(count, records)
        lasts = self._budget.lasts
        sure = self.costs.has_guesses(count) or self._budget.left > -_DOUBT
        pays = gain > 1 if lasts else gain >= _GAIN and sure
        if len(seen) < count and pays and self._pays_for_all(answering):
            seen = answering
        if len(seen) == count and pays:
            self._tried = {sequence.id for sequence in seen}
            self._failed = 0
            return {one.id: self._own(record, best, count) for one, record in zip(answering, records, strict=True)}
        self._undecided = self._best(count, [_lucky(record) for record in records])[1] > 1
        if seen and lasts and self._undecided:
            self._tried = {sequence.id for sequence in seen}
            return {sequence.id: best for sequence in seen}
        self._guessing = False
        self._failed += not self._undecided
        self._plain_steps = 0
        return {}

    def see(self, sequence: Sequence, guessed: int, accepted: int) -> None:
        self._records[sequence.id] = self._record(sequence).after(guessed, accepted)
        self._everybody = self._everybody.after(guessed, accepted)

    def account(self, steps: float, lost: float) -> None:
        """A step took as long as so many plain ones, of which so many were lost to guessing."""
        self._budget.passed(steps)
        self._budget.spend(lost)
        self._dearest = max(self._dearest, min(lost, MOST_GAINED))

    def forget(self, sequence: Sequence) -> None:
        self._records.pop(sequence.id, None)
        self._tried.discard(sequence.id)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Within, nothing is learned from guesses."""
        values = ("_everybody", "_guessing", "_failed", "_undecided", "_dearest", "_plain_steps", "_quiet")
        known = {name: getattr(self, name) for name in values}
        tried, left = set(self._tried), self._budget.left
        try:
            yield
        finally:
            vars(self).update(known)
            self._tried, self._budget.left = tried, left

    def _record(self, sequence: Sequence) -> _Record:
        """A new one begins with what the others' guesses are worth, and soon has its own."""
        known = self._records.get(sequence.id)
        if known is None:
            everybody = self._everybody
            weight = min(everybody.tested, 2.0)
            known = _Record(weight * everybody.acceptance, weight, everybody.offered)
        return known

    def _best(self, sequences: int, records: list[_Record]) -> tuple[int, float]:
        """The number of guesses with the most tokens in a second, and how many times as many as plain steps have."""
        plain = self.costs.estimate(sequences, 0)
        assert plain is not None
        best, gain = 0, 0.0
        for guesses in self.candidates:
            seconds = self.costs.estimate(sequences, guesses)
            assert seconds is not None
            found = (
                sum(_tokens(record, min(guesses, self._deepest)) for record in records) / sequences * plain / seconds
            )
            if found > gain:
                best, gain = guesses, found
        return best, gain

    def _cheapest_look(self, answering: list[Sequence]) -> tuple[list[Sequence], float]:
        """Whom to ask for guesses, and the plain steps that a first step costs if all of them are wrong."""
        count = len(answering)
        plain, seconds = self.costs.estimate(count, 0), self.costs.estimate(count, 1)
        assert plain is not None
        assert seconds is not None
        step = seconds / plain - 1
        waiting = sorted(answering, key=self._unread)
        asked, least, tokens = 0, float("inf"), 0
        for number, sequence in enumerate(waiting, 1):
            tokens += self._unread(sequence)
            price = self.costs.reading(tokens) / plain + step * max(1.0, _TESTS / number)
            if price < least:
                asked, least = number, price
        tokens = sum(self._unread(sequence) for sequence in waiting[:asked])
        return waiting[:asked], _SWITCH + step + self.costs.reading(tokens) / plain

    def _pays_for_all(self, answering: list[Sequence]) -> bool:
        """Whether guesses pay as they did lately, even with less luck, and what was not read yet with them."""
        if self._everybody.tested < _TESTS or not self.costs.has_guesses(len(answering)):
            return False
        gain = self._best(len(answering), [_lucky(self._record(one), -_LUCK) for one in answering])[1]
        return gain >= _GAIN and self._pays_back(answering, gain)

    def _pays_back(self, answering: list[Sequence], gain: float) -> bool:
        """What must be read for all of them, while they last."""
        plain = self.costs.estimate(len(answering), 0)
        assert plain is not None
        tokens = sum(self._unread(sequence) for sequence in answering if sequence.id not in self._tried)
        left = sum(min(one.max_new - one.num_answered, _HORIZON) for one in answering) / len(answering)
        return self.costs.reading(tokens) <= (1 - 1 / gain) * left * plain if gain > 1 else False

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


def _lucky(record: _Record, luck: float = _LUCK) -> _Record:
    """As good as it may still turn out to be; with negative luck, as bad."""
    right = record.right + luck * record.tested**0.5
    return replace(record, right=min(max(right, 0.0), max(_HOPE * record.tested, record.right)))


def _tokens(record: _Record, guesses: int) -> float:
    """Expected from a step."""
    a = record.acceptance
    return 1 + record.offered * a * (1 - a**guesses) / (1 - a)
