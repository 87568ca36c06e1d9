"""Engine, scheduler and page pool against a device made of lists: any order of requests, steps and aborts.

In place of keys and values, every slot of a page holds a number that only this token after exactly these tokens has. So
a page that is shared wrongly, reused too early, copied too late or not at all shows as soon as it is read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.pages import PADDING_PAGE
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.core.step_plan import FROM_ROW, Scheduled, StepPlan
from quantkit.runtime.core.step_result import Outcome, PromptLogprobs, Sampled
from quantkit.runtime.device.memory import MemoryPlan
from quantkit.runtime.device.step_inputs import InputMaker, TableChanges
from quantkit.runtime.engine.engine import Engine, Request
from quantkit.runtime.engine.scheduler import Scheduler
from quantkit.runtime.engine.speculation import Speculation
from quantkit.runtime.engine.speculation_policy import Policy
from quantkit.runtime.engine.step_costs import Costs
from quantkit.runtime.llm import Answer, _generation

END = 2
VOCAB = 3
prompts = st.builds(
    lambda pattern, length: (pattern * length)[:length],  # few of them, so that beginnings collide
    st.sampled_from(([0], [0, 1], [0, 0, 1])),
    st.integers(1, 9),
)


def chained(tokens: list[int]) -> list[int]:
    """For every token a number that depends on it and on all in front of it, as keys and values do."""
    found: list[int] = []
    for token in tokens:
        found.append(hash((found[-1] if found else 0, token)))
    return found


def numbered(work: Scheduled) -> PromptLogprobs:
    """In place of log-probabilities, the positions that they are for."""
    positions = range(work.start + 1, min(work.start + work.num_tokens + 1, len(work.sequence.prompt)))
    return PromptLogprobs(work.start + 1, [float(at) for at in positions], [[] for _ in positions])


def drawn(seed: int, position: int) -> int:
    """The token at a position: as from a model, nobody else knows it before."""
    return Random(seed * 1009 + position).choices((0, 1, END), (9, 9, 1))[0]


class Guesser:
    """Drafts that are right half of the time, and as long as asked for or shorter."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        random = Random(len(sequence.tokens) * 31 + sequence.seed)
        right = [drawn(sequence.seed, len(sequence.tokens) + ahead) for ahead in range(random.randint(0, most))]
        return [token if random.random() < 0.7 else random.randrange(VOCAB) for token in right]

    def observe(self, launched: Any, outcomes: list[Outcome], ended: Collection[int]) -> None:
        pass

    def follow(self, launched: Any) -> None:
        pass


class PaperRunner:
    """Does what `Runner` documents, with lists. A step is done when it is launched; the host asks for it later."""

    device = "cpu"

    def __init__(self, pages: int, page_size: int, rows: int, width: int) -> None:
        self.size = page_size
        self.pages = [[0] * page_size for _ in range(pages)]
        self.table = [[PADDING_PAGE] * width for _ in range(rows)]
        self.last_token = [END] * rows
        self.truth: dict[int, list[int]] = {}  # by sequence: its tokens, those that the host has not seen included
        self.host: dict[int, list[list[int]]] = {}  # by sequence: pages that were swapped out
        self.guessed: dict[int, tuple[int, int]] = {}  # by sequence, until the host asks: guesses right and wrong
        self._changes = TableChanges(rows, width)
        self._maker = InputMaker(page_size)
        self._width = width

    def prepare(self, plan: StepPlan) -> None:
        self.move_pages(plan)
        for index, page in zip(*self._changes.of(plan), strict=True):
            row, column = divmod(index, self._width)
            self.table[row][column] = page

    def launch(self, plan: StepPlan) -> Any:
        inputs = self._maker.make(plan)
        for number, work in enumerate(plan.scheduled):
            first, last = inputs.starts[number : number + 2]
            self._write(work, inputs.ids[first:last], inputs.positions[first:last], inputs.kv_slots[first:last])
        for work, row, context in zip(plan.scheduled, inputs.rows, inputs.contexts, strict=True):
            self.check_contents(work.sequence, self.table[row], context, work.draft)
        samples = []
        for work in plan.scheduled:
            if work.samples:
                samples.append(Outcome(work, self._verify(work)))
                self.last_token[work.sequence.row] = samples[-1].tokens[-1].token
                right = samples[-1].num_accepted
                self.guessed[work.sequence.id] = right, len(work.draft) - right
        asked = [work for work in plan.scheduled if work.sequence.needs_all_logits]
        prompts = {work.sequence.id: numbered(work) for work in asked}
        return SimpleNamespace(plan=plan, launched=SimpleNamespace(plan=plan, samples=samples, prompts=prompts))

    def arrived(self, flight: Any) -> Any:
        return flight.launched

    def collect(self, launched: Any) -> list[Outcome]:
        for outcome in launched.samples:
            self.guessed.pop(outcome.scheduled.sequence.id, None)
        return list(launched.samples)

    def check_contents(self, sequence: Sequence, pages: list[int], context: int, draft: tuple[int, ...] = ()) -> None:
        read = [self.pages[pages[at // self.size]][at % self.size] for at in range(context)]
        truth = [*self.truth[sequence.id], *draft]
        assert read == chained(truth[:context]), f"sequence {sequence.id} reads what is not its own"

    def _write(self, work: Scheduled, ids: list[int], positions: list[int], kv_slots: list[int]) -> None:
        sequence = work.sequence
        tokens = [*self.truth.setdefault(sequence.id, list(sequence.prompt)), *work.draft]
        values = chained(tokens)
        for token, position, kv_slot in zip(ids, positions, kv_slots, strict=True):
            sent = self.last_token[sequence.row] if token == FROM_ROW else token
            assert sent == tokens[position], f"sequence {sequence.id} computes another token at {position}"
            page, inside = divmod(kv_slot, self.size)
            assert page != PADDING_PAGE
            self.pages[page][inside] = values[position]

    def _verify(self, work: Scheduled) -> list[Sampled]:
        """A token behind each guess, as far as guesses are right."""
        tokens = self.truth[work.sequence.id]
        found = []
        for guess in (*work.draft, None):
            found.append(Sampled(drawn(work.sequence.seed, len(tokens))))
            tokens.append(found[-1].token)
            if found[-1].token != guess:
                break
        return found

    def move_pages(self, plan: StepPlan) -> None:
        """In the order that `StepPlan` documents; copies read all before they write, as one kernel does."""
        for sequence, taken in plan.swap_out:
            self.host[sequence.id] = [list(self.pages[page]) for page in taken]
        for sequence, given in plan.swap_in:
            assert sequence.id in self.host, f"sequence {sequence.id} comes back, but was never brought to the host"
            kept = self.host.pop(sequence.id)[: len(given)]  # pages of a draft that was wrong stay behind
            for page, contents in zip(given, kept, strict=True):
                self.pages[page] = contents
        copied = [(target, list(self.pages[source])) for source, target in plan.copies]
        for target, contents in copied:
            self.pages[target] = contents


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
