"""Engine, scheduler and page pool against a device made of lists (tests/support/paper_runner.py): any order of
requests, steps and aborts.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paper_runner import END, VOCAB, Guesser, PaperRunner
from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.device.memory import MemoryPlan
from quantkit.runtime.engine.engine import Engine, Request
from quantkit.runtime.engine.speculation import Speculation
from quantkit.runtime.engine.speculation_policy import Policy
from quantkit.runtime.engine.step_costs import Costs
from quantkit.runtime.llm import _generation
from quantkit.runtime.output.answers import Answer
from watched_scheduler import WatchedScheduler

prompts = st.builds(
    lambda pattern, length: (pattern * length)[:length],  # few of them, so that beginnings collide
    st.sampled_from(([0], [0, 1], [0, 0, 1])),
    st.integers(1, 9),
)


class Whim(Policy):
    """Now and then nobody guesses for some steps; else everybody gets another number of guesses each time."""

    def __init__(self, most: int) -> None:
        super().__init__(most, Costs())
        self._dice = Random(most)
        self._quiet = 0

    def lengths(self, answering: list[Sequence]) -> dict[int, int]:
        self._quiet = self._quiet - 1 if self._quiet else self._dice.choice((0, 0, 0, 0, 0, 3))
        return {} if self._quiet else {one.id: self._dice.randint(0, self.most) for one in answering}


class SchedulerMachine(RuleBasedStateMachine):
    """Small pools, so that sequences are preempted all the time."""

    @initialize(
        page_size=st.sampled_from((2, 4)),
        usable=st.integers(4, 16),
        rows=st.sampled_from((1, 2, 3, 4, 6)),
        budget=st.sampled_from((2, 5, 8, 16)),
        swap=st.sampled_from((0, 10, 50)),
        reserve=st.sampled_from((0.0, 0.0, 0.2)),
        overlap=st.booleans(),
        share_prefixes=st.sampled_from((True, True, True, False)),
        guesses=st.sampled_from((0, 1, 3, 6)),
    )
    def start(
        self,
        page_size: int,
        usable: int,
        rows: int,
        budget: int,
        swap: int,
        reserve: float,
        overlap: bool,
        share_prefixes: bool,
        guesses: int,
    ) -> None:
        context = usable * page_size
        plan = MemoryPlan(0, 0, 0, 0, 0, page_size, usable + 1, context, host_pages=swap)
        options = EngineOptions(
            device="cpu",
            max_sequences=rows,
            step_tokens=budget,
            overlap=overlap,
            share_prefixes=share_prefixes,
        )
        self.runner = PaperRunner(usable + 1, page_size, rows, usable)
        config: Any = SimpleNamespace(vocab=VOCAB, eos=(END,))
        runner: Any = self.runner
        self.engine = Engine(config, runner, plan, options)
        self.engine.speculation = Speculation(Guesser(), Whim(guesses), early=Guesser()) if guesses else Speculation()
        made = self.engine.scheduler
        self.scheduler = WatchedScheduler(made.pool, replace(made.limits, reserve=reserve))
        self.engine.scheduler = self.scheduler
        self.context = context
        self.requests: list[Request] = []
        self.clock = 0.0
        self.sound = True

    @rule(
        prompt=prompts,
        n=st.sampled_from((1, 1, 2, 3)),
        max_new=st.sampled_from((1, 3, 9, 15, 24)),
        priority=st.integers(-1, 1),
        all_logits=st.sampled_from((False, False, False, True)),
        seed=st.integers(0, 7),
    )
    def add(self, prompt: list[int], n: int, max_new: int, priority: int, all_logits: bool, seed: int) -> None:
        self.clock += 4.0  # a level of priority is worth two requests and a half
        params = SamplingParams(n=n, max_tokens=max_new, seed=seed, prompt_logprobs=0 if all_logits else None)
        prompt = prompt[: self.context - 1]
        self.requests.append(self.engine.add(prompt, params, priority=priority, arrived=self.clock))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 30), more=st.lists(st.integers(0, 1), max_size=3), max_new=st.integers(1, 8))
    def follow_up(self, which: int, more: list[int], max_new: int) -> None:
        """A prompt that begins with an earlier prompt and its answer, as in a conversation."""
        earlier = self.requests[which % len(self.requests)].sequences[-1]
        prompt = [token for token in earlier.tokens if token != END] + more
        self.add(prompt, 1, max_new, 0, False, which)

    @precondition(lambda self: self.engine.unfinished > 2)
    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        living = list(self.engine.requests)
        self.engine.abort(living[which % len(living)])

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._step()

    def drain(self) -> None:
        """With nothing added, everything ends in time."""
        living = [sequence for request in self.engine.requests.values() for sequence in request.sequences]
        longest = max((len(one.prompt) + one.max_new + 2 for one in living), default=0)
        steps = len(living) * (self.scheduler.limits.sequences + 1) * longest
        while self.engine.unfinished:
            assert steps > 0, "somebody starves"
            steps -= 1
            self._step()
        assert self.scheduler.unfinished == 0
        assert self.scheduler.pool.free == self.scheduler.pool.usable
        for request in self.requests:
            for sequence in request.sequences:
                self._check_answer(sequence)
            if request.params.prompt_logprobs is not None and request.sequences[0].finish_reason != "abort":
                found = _generation(request, [Answer(0)], request.prompt).prompt_logprobs
                assert found == [None, *range(1, len(request.prompt))], "log-probabilities of the prompt, each once"

    @invariant()
    def everything_is_in_order(self) -> None:
        self.engine.check_integrity()
        living = [*self.scheduler.running, *self.scheduler.waiting]
        swapped = sum(sequence.swapped.num_pages for sequence in living if sequence.swapped is not None)
        assert self.scheduler.swapped_pages == swapped <= self.scheduler.limits.swap_pages
        for sequence in self.scheduler.running:
            _, wrong = self.runner.guessed.get(sequence.id, (0, 0))
            self.runner.check_contents(sequence, sequence.pages, sequence.num_computed - wrong)
        for sequence in living:
            truth = self.runner.truth.get(sequence.id, sequence.prompt)
            right, _ = self.runner.guessed.get(sequence.id, (0, 0))
            assert len(truth) == sequence.length + right
            assert truth[: len(sequence.tokens)] == sequence.tokens

    def teardown(self) -> None:
        if hasattr(self, "engine") and self.sound:
            self.drain()

    def _step(self) -> None:
        self.sound = False  # until the step and its checks are through
        deltas = self.engine.step()
        for delta in deltas:
            assert delta.token is not None
        self.everything_is_in_order()
        self.sound = True

    def _check_answer(self, sequence: Sequence) -> None:
        assert sequence.finish_reason in ("stop", "length", "abort")
        answer = sequence.answer
        assert END not in answer[:-1]
        if sequence.finish_reason != "abort":
            assert (answer[-1] == END) == (sequence.finish_reason == "stop")
            assert len(answer) == sequence.max_new or sequence.finish_reason == "stop"
        assert 0 <= sequence.num_reused < len(sequence.prompt)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)


def run_traffic(seed: int, *, actions: int) -> SchedulerMachine:
    """A pool under pressure: requests of many lengths come as others end. What the machine above does rarely."""
    dice = Random(seed)
    machine = SchedulerMachine()
    machine.start(
        page_size=dice.choice((2, 4)),
        usable=dice.randint(6, 18),
        rows=dice.randint(2, 8),
        budget=dice.choice((2, 6, 10, 30)),
        swap=dice.choice((0, 10, 50)),
        reserve=dice.choice((0.0, 0.1)),
        overlap=dice.random() < 0.5,
        share_prefixes=dice.random() < 0.8,
        guesses=dice.choice((0, 1, 4, 8)),
    )
    for _ in range(actions):
        if machine.engine.unfinished < dice.randint(2, 6):
            prompt = (dice.choice(([0], [0, 1], [0, 0, 1])) * 12)[: dice.randint(1, 12)]
            max_new = dice.randint(1, 30)
            machine.add(prompt, dice.choice((1, 1, 2, 3)), max_new, dice.randint(-1, 1), dice.random() < 0.1, seed)
        elif dice.random() < 0.05:
            machine.abort(dice.randrange(30))
        elif dice.random() < 0.1:
            machine.follow_up(dice.randrange(30), [dice.randrange(2)], dice.randint(1, 20))
        machine.step(dice.randint(1, 2))
    machine.teardown()
    return machine


def test_traffic_under_pressure() -> None:
    machines = [run_traffic(seed, actions=120) for seed in range(40)]
    assert sum(machine.scheduler.preemptions for machine in machines) > 500
    assert sum(machine.scheduler.reused_tokens for machine in machines) > 500
    assert sum(machine.scheduler.pool.evictions for machine in machines) > 500
    right = sum(machine.engine.speculation.accepted for machine in machines)
    wrong = sum(machine.engine.speculation.guessed for machine in machines) - right
    assert min(right, wrong) > 500
