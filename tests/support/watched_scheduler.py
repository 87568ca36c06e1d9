"""A scheduler that checks every plan against what it promises."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.runtime.core.step_plan import StepPlan
from quantkit.runtime.engine.scheduler import Scheduler


@dataclass(frozen=True)
class Before:
    """A running sequence when a step was planned."""

    id: int
    missing: int  # tokens that exist and are not computed
    waits: bool


class WatchedScheduler(Scheduler):
    """Checks every plan against what the scheduler promises."""

    def schedule(self) -> StepPlan:
        before = [Before(one.id, one.length - one.num_computed, one.must_wait) for one in self.running]
        plan = super().schedule()
        self._check_shares(plan)
        left = self._check_running(before, plan)
        self._check_admitted({state.id for state in before}, left, plan)
        return plan

    def _check_shares(self, plan: StepPlan) -> None:
        assert plan.tokens <= self.limits.tokens
        assert len(self.running) <= self.limits.sequences
        assert len({work.sequence.id for work in plan.scheduled}) == len(plan.scheduled)
        for work in plan.scheduled:
            reached, length = work.start + work.num_tokens, work.sequence.length - work.samples
            assert work.num_tokens > len(work.draft)
            assert work.samples == (reached - len(work.draft) == length)
            assert reached == work.sequence.num_computed
            assert reached <= len(work.sequence.prompt) + work.sequence.max_new
            assert list(work.draft) == work.sequence.draft[: len(work.draft)]
            assert work.sequence in self.running

    def _check_running(self, before: list[Before], plan: StepPlan) -> int:
        """Running sequences are served by rank; prompts leave a token for each answer behind them.

        Returns what is left of the budget."""
        gone = [sequence.id for sequence in plan.preempted]
        assert sorted(gone) == sorted(state.id for state in before[len(before) - len(gone) :]), "the last ones give way"
        served = {work.sequence.id: work.num_tokens - len(work.draft) for work in plan.scheduled}
        guesses = {work.sequence.id: len(work.draft) for work in plan.scheduled}
        left = self.limits.tokens
        able = [state for state in before if not state.waits]
        for place, state in enumerate(able):
            if state.id in gone:
                continue
            count = served.get(state.id, 0)
            answers_behind = sum(other.missing == 1 for other in able[place + 1 :])
            assert count >= min(state.missing, left - answers_behind), "budget is left over"
            if state.missing == 1:
                assert count == min(left, 1), "an answer goes on while there is budget"
            assert count <= max(1, left - answers_behind), "an answer must not wait for a long prompt"
            assert place or count > 0, "the first one always goes on"
            left -= count + guesses.get(state.id, 0)
            assert left >= answers_behind or not guesses.get(state.id), "guesses must not cost others their token"
        return left

    def _check_admitted(self, known: set[int], left: int, plan: StepPlan) -> None:
        """Waiting sequences are admitted by rank as long as budget, device rows and pages last."""
        admitted = [work for work in plan.scheduled if work.sequence.id not in known]
        ranks = [work.sequence.rank for work in admitted] + [sequence.rank for sequence in self.waiting]
        assert not admitted or ranks == sorted(ranks)
        for work in admitted:
            length = work.sequence.length - work.samples
            assert work.num_tokens == min(length - work.start, left)
            left -= work.num_tokens
        if plan.preempted:
            assert not admitted, "who gives way must not be overtaken in the same step"
        elif self.waiting and left and len(self.running) < self.limits.sequences and not self.waiting[0].num_pending:
            reserve = int(self.pool.usable * self.limits.reserve) if self.running else 0
            pages = -(-self.waiting[0].length // self.pool.page_size)
            assert pages + reserve + 1 > self.pool.free, "the first in line would fit"
