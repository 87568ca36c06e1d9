"""Speculative decoding: tokens are guessed, and one step verifies several at once.

A draft of k guesses goes into a step behind the last known token. The target samples a token behind each of them, with
the random numbers of that position, as it would have done one by one. As far as the guesses are what was sampled, they
are the answer; the first that is not gives way to the sampled token, and everything behind it was never there. So
answers are those of plain decoding, token for token, whatever is guessed; a guess x survives with the target's p(x).

A request without a seed that samples, and whose guesses come from a draft model, is verified by another rule, which
accepts more and keeps the distribution, but not each token (`sampling/rejection.py`).

A sequence that speculates must know its last token before the next step, so it gives up the overlap of steps. How much
is guessed, and whether at all, is the policy's decision before every step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.step_plan import StepPlan
from quantkit.runtime.core.step_result import Launched, Outcome
from quantkit.runtime.device.decode_graphs import Key, StepGraphs
from quantkit.runtime.engine.drafter import DeviceDrafter, Drafter, EarlyDrafter
from quantkit.runtime.engine.speculation_policy import Policy
from quantkit.runtime.engine.step_costs import Costs

_PREPARED = (1, 2, 4, 8, 16, 32)  # sequences, for which steps with guesses are prepared


class Speculation:
    """Guesses for those who answer, and how good they were. Without a drafter, nobody speculates."""

    def __init__(
        self,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        *,
        device: DeviceDrafter | None = None,
        early: EarlyDrafter | None = None,
        tree: tuple[int, ...] = (),
        capture: Callable[[int, int], None] | None = None,
        overlaps: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`device` and `early` are the drafter again, where it can do that. `tree` has the parents of its guesses where
        they are one (`Scheduled`). `capture` makes what its guesses for so many sequences, so many each, wait for at
        first. `overlaps`: plain steps are launched before the one in front has ended. `clock`: seconds."""
        self._drafter = drafter
        self._device = device
        self._early = early
        self._tree = tree
        self._capture = capture
        self._overlaps = overlaps
        self._clock = clock
        self._policy = policy or Policy(0, Costs())
        self._active = drafter is not None  # whether guesses pay now
        self._begun: deque[tuple[float, bool, bool]] = deque()  # steps in flight: `begin`
        self._was_active = False  # in the step before
        self._wanted: set[int] = set()  # sequences for which the policy wants guesses now
        self._asked: set[int] = set()  # of the steps in flight, those for which it did
        self._gone: list[int] = []  # sequences that ended since the drafter last heard of any
        self._num_running = 0  # sequences, when the last step was planned
        self._ended = 0.0  # when the last step was seen
        self._last: set[int] = set()  # sequences in it
        self._coin: Callable[[], bool] | None = None  # for benchmarks
        self.steps = 0  # in which a draft was verified, counted for each sequence
        self.guessed = 0  # tokens
        self.accepted = 0  # of these
        self.saved_seconds = 0.0  # against decoding token by token, as far as the cost of steps is known

    @property
    def on(self) -> bool:
        return self._drafter is not None

    def force_acceptance(self, rate: float, seed: int = 0) -> None:
        """For benchmarks: every guess counts as right with this probability. Answers are not the model's then."""
        dice = Random(seed)
        self._coin = lambda: dice.random() < rate

    @property
    def lengths(self) -> list[int]:
        """Numbers of guesses that a step may have."""
        return self._policy.candidates if self._drafter is not None else []

    def loads(self, sequences: int) -> list[tuple[int, int]]:
        """Sizes of steps, sequences and guesses, that may come where so many sequences run."""
        return [(size, guesses) for size in _PREPARED if size <= sequences for guesses in self.lengths]

    def prepare(self, graphs: StepGraphs, sequences: int, guesses: int) -> None:
        """Captures what a step of this size needs."""
        key = Key(sequences, 1 + guesses, bool(self._tree))
        if graphs.takes(sequences, 1 + guesses, key.tree):
            graphs.capture(key)
            if self._capture is not None:
                self._capture(sequences, guesses)

    def reset(self) -> None:
        """Counters and records, as if nothing had run; what steps cost stays known."""
        self._policy.forget_everybody()
        self.steps = self.guessed = self.accepted = 0
        self.saved_seconds = 0.0

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Within, how guesses do is not remembered; what steps cost is."""
        counted = self.steps, self.guessed, self.accepted, self.saved_seconds
        try:
            with self._policy.unrecorded():
                yield
        finally:
            self.steps, self.guessed, self.accepted, self.saved_seconds = counted

    def add(self, sequence: Sequence) -> None:
        """A sequence that is new; its prompt is read with guesses in mind."""
        sequence.speculates = self.on and self._policy.reads_prompts

    def propose(self, running: list[Sequence]) -> None:
        """Drafts for all that wait for their next token only."""
        if self._drafter is None:
            return
        answering = [one for one in running if one.length - one.num_computed == 1 and not one.at_limit]
        self._num_running = len(running)
        lengths = self._policy.lengths(answering)
        self._wanted = {number for number, most in lengths.items() if most > 0}
        if answering:
            self._active = bool(lengths)
        for sequence in running:
            sequence.speculates = self._active
            sequence.draft, sequence.tree = [], self._tree
            left = sequence.max_new - sequence.num_answered - 1  # the token behind the draft is one too
            most = min(lengths.get(sequence.id, 0), left)
            if sequence.must_wait:  # pages that a step on its way asked for stay
                continue
            if most > 0:
                sequence.draft = self._drafter.propose(sequence, most)
            sequence.ahead = len(sequence.draft) if self._early is not None else 0

    def begin(self, plan: StepPlan) -> StepPlan:
        """The step as it is planned, before it is launched; returns it with its guesses."""
        if self._drafter is None:
            return plan
        # Somebody who was in the last step did not end, so the engine was never idle: what the host did counts too.
        goes_on = any(work.sequence.id in self._last for work in plan.scheduled)
        began = self._ended if goes_on else self._clock()
        # First guesses after plain steps take longer: a draft model has tokens to read, and no guess is there early.
        self._begun.append((began, bool(self._begun), self._active == self._was_active))
        self._was_active = self._active
        self._asked |= self._wanted & {work.sequence.id for work in plan.scheduled}
        if self._device is not None:
            plan = self._device.complete(plan)
        if self._coin is not None:
            rows = sum(1 + len(work.draft) for work in plan.scheduled if work.samples)
            plan = replace(plan, coins=[self._coin() for _ in range(rows)])
        return plan

    def follow(self, launched: Launched) -> None:
        """The step was launched, and nobody has looked at its results."""
        if self._early is not None:
            self._early.follow(launched)

    def end(self, launched: Launched, outcomes: list[Outcome]) -> None:
        """The results of a step are there; its tokens are not known yet."""
        if self._drafter is None:
            return
        now = self._clock()
        begun, overlapped, settled = self._begun.popleft()
        seconds = now - max(begun, self._ended)
        self._ended, plan = now, launched.plan
        self._last = {work.sequence.id for work in plan.scheduled}
        seen = [one for one in outcomes if not one.scheduled.sequence.finished
                and (one.scheduled.draft or one.scheduled.sequence.speculates)]  # fmt: skip
        if seen or self._gone:
            self._drafter.observe(launched, seen, self._gone)
            self._gone = []
        for outcome in seen:
            self._count(outcome)
        if plan.answers_only:
            guesses = max(len(work.draft) for work in plan.scheduled)
            typical = settled if guesses else overlapped or not self._overlaps
            if typical:
                self._policy.costs.observe(len(plan.scheduled), guesses, seconds)
            everybody = max(self._num_running, len(plan.scheduled))  # some may be in a step that is on its way
            plain = self._policy.costs.estimate(everybody, 0)
            if plain is not None:
                tokens = sum(len(outcome.tokens) for outcome in outcomes) / everybody
                plain_step = not guesses and typical
                self._policy.account(seconds / plain, 0.0 if plain_step else seconds / plain - tokens)
                self.saved_seconds += plain * tokens - seconds if guesses else 0.0

    def drop_steps(self, in_flight: int) -> None:
        """A step failed: so many are on their way now."""
        while len(self._begun) > in_flight:
            self._begun.popleft()

    def _count(self, outcome: Outcome) -> None:
        """How the guesses for one sequence did."""
        sequence, guessed = outcome.scheduled.sequence, len(outcome.scheduled.draft)
        if sequence.id in self._asked:  # not behind a prompt: there was no guess, but nobody wanted one
            self._asked.remove(sequence.id)
            self._policy.see(sequence, guessed, outcome.num_accepted)
        if guessed:
            self.steps += 1
            self.guessed += guessed
            self.accepted += outcome.num_accepted
            sequence.num_guessed += guessed
            sequence.num_accepted += outcome.num_accepted

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if self._drafter is not None:
            self._gone.append(sequence.id)
            self._policy.forget(sequence)
            self._asked.discard(sequence.id)
