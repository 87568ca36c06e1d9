"""What `Speculation` makes of steps: which ones count, who is seen, and who is forgotten."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import pytest
import torch

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import Sequence, Status
from quantkit.runtime.core.step_plan import Scheduled, StepPlan
from quantkit.runtime.core.step_result import Launched, Outcome, Sampled, Samples
from quantkit.runtime.drafters.ngram import NgramDrafter
from quantkit.runtime.engine.speculation import Speculation
from quantkit.runtime.engine.speculation_policy import Policy
from quantkit.runtime.engine.step_costs import Costs


def sequences(count: int) -> list[Sequence]:
    return [Sequence(number, [1], SamplingParams(), 0.0, 0, 100) for number in range(count)]


class _AsTold(Policy):
    """Guesses in the steps it is told to, and remembers nothing else."""

    told: bool = False
    seen: int = 0

    def see(self, sequence: Sequence, guessed: int, accepted: int) -> None:
        self.seen += 1

    def lengths(self, answering: list[Sequence]) -> dict[int, int]:
        return {one.id: 2 for one in answering} if self.told else {}


def test_the_first_step_with_guesses_after_plain_ones_is_not_typical() -> None:
    """There a draft model reads all it missed. Such a time, believed, would say that guesses never pay."""
    clock = SimpleNamespace(now=0.0)
    policy = _AsTold(2, Costs())
    speculation = Speculation(NgramDrafter(), policy, clock=lambda: clock.now)
    one = Sequence(0, [1, 2, 3, 1, 2, 3, 1, 2], SamplingParams(), 0.0, 0, 100)
    one.num_computed = len(one.tokens) - 1

    def step(guesses: bool, seconds: float) -> None:
        policy.told = guesses
        speculation.propose([one])
        draft = tuple(one.draft)
        assert bool(draft) == guesses
        plan = StepPlan([Scheduled(one, one.num_computed, 1 + len(draft), samples=True, draft=draft)])
        speculation.begin(plan)
        clock.now += seconds
        speculation.end(Launched(plan, plan.scheduled, Samples(torch.zeros(1)), None, {}, None), [])

    for _ in range(4):
        step(False, 1.0)
        step(True, 9.0)
        step(True, 2.0)
    step(False, 1.0)
    step(True, 9.0)
    assert policy.costs.estimate(1, 0) == pytest.approx(1.0)
    assert policy.costs.estimate(1, 2) == pytest.approx(2.0)


def test_a_prompt_says_nothing_about_guesses() -> None:
    """There was none behind it, but none was wanted: the share of steps with a guess stays what it was."""
    policy = _AsTold(2, Costs())
    speculation = Speculation(NgramDrafter(), policy)
    one = Sequence(0, [1, 2, 3, 1, 2, 3, 1, 2], SamplingParams(), 0.0, 0, 100)
    policy.told, seen = True, []
    for start in (0, 7):
        one.num_computed = start
        speculation.propose([one])
        work = Scheduled(one, start, 8 - start + len(one.draft), samples=True, draft=tuple(one.draft))
        plan = StepPlan([work])
        speculation.begin(plan)
        outcome = Outcome(work, [Sampled(3)])
        speculation.end(Launched(plan, [work], Samples(torch.zeros(1)), None, {}, None), [outcome])
        seen.append(policy.seen)
    assert seen == [0, 1]


class _Noting(NgramDrafter):
    """Writes down whose results it sees, and who is said to have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[list[int], list[int]]] = []

    def observe(self, launched: Launched, outcomes: list[Outcome], ended: Collection[int]) -> None:
        self.noted.append(([outcome.scheduled.sequence.id for outcome in outcomes], list(ended)))


def test_a_drafter_sees_those_who_go_on_and_hears_once_of_those_who_ended() -> None:
    policy, drafter = _AsTold(2, Costs()), _Noting()
    policy.told = True
    speculation, running = Speculation(drafter, policy), sequences(2)

    def step() -> None:
        speculation.propose(running)
        scheduled = [Scheduled(one, 0, 1, samples=True) for one in running]
        plan = speculation.begin(StepPlan(scheduled))
        outcomes = [Outcome(work, [Sampled(3)]) for work in scheduled]
        speculation.end(Launched(plan, scheduled, Samples(torch.zeros(2)), None, {}, None), outcomes)

    step()
    running[0].status = Status.FINISHED
    speculation.forget(running[0])
    step()
    step()
    assert drafter.noted == [([0, 1], []), ([1], [0]), ([1], [])]


def test_a_plan_with_guesses_is_another_plan() -> None:
    """The one that the scheduler made stays as it was."""
    first, second = sequences(2)
    plan = StepPlan([Scheduled(first, 0, 3, True, (-2, -3)), Scheduled(second, 0, 2, True, (-2,))])
    logits = {1: torch.zeros(1, 5)}
    found = plan.with_guesses({0: (7, 8)}, logits)
    assert [work.draft for work in found.scheduled] == [(7, 8), (-2,)]
    assert found.proposals == logits
    assert [work.draft for work in plan.scheduled] == [(-2, -3), (-2,)]
    assert plan.proposals == {}
    assert plan.with_guesses({}, {}) is plan
