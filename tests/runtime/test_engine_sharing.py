"""Who holds which pages, who computes what, and who comes first: seen from outside, on engines that run."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quantkit.runtime.core.options import EngineOptions
from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.step_plan import StepPlan
from quantkit.runtime.core.token_output import TokenOutput
from quantkit.runtime.engine.engine import PRIORITY_SECONDS, Engine, Request
from quantkit.runtime.startup import start_engine

TOKENS = range(3, 112)
WatchPlans = Callable[..., list[StepPlan]]
Start = Callable[..., Engine]

overlapped_or_not = pytest.mark.parametrize("overlap", [False, True], ids=["waiting", "overlap"])
# Two switches, each on and off; the other two of the four cases are long.
EACH_ONCE = [
    (False, False),
    (True, True),
    pytest.param(False, True, marks=pytest.mark.long),
    pytest.param(True, False, marks=pytest.mark.long),
]


@pytest.fixture
def start(family_model: Callable[[str], Path]) -> Start:
    """`start(**options)`: an engine for a tiny Llama of 256 positions."""

    def begin(**options: Any) -> Engine:
        return start_engine(family_model("llama"), EngineOptions(device="cpu", **options))

    return begin


@pytest.fixture
def watch_plans(monkeypatch: pytest.MonkeyPatch) -> WatchPlans:
    """`watch_plans(engine, on_plan)`: a list that receives the plan of every step; `on_plan` is called with it."""

    def watch(engine: Engine, on_plan: Callable[[StepPlan], None] = lambda plan: None) -> list[StepPlan]:
        plans: list[StepPlan] = []
        schedule = engine.scheduler.schedule

        def watched() -> StepPlan:
            plans.append(schedule())
            on_plan(plans[-1])
            return plans[-1]

        monkeypatch.setattr(engine.scheduler, "schedule", watched)
        return plans

    return watch


def greedy(new_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, ignore_eos=True, **more)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(TOKENS, k=length)


def checked_step(engine: Engine) -> list[TokenOutput]:
    deltas = engine.step()
    engine.check_integrity()
    return deltas


def finish(engine: Engine) -> dict[tuple[int, int], list[int]]:
    """Runs until nothing is left: tokens by request and index. Every page is free in the end."""
    answers: dict[tuple[int, int], list[int]] = {}
    while engine.unfinished:
        for delta in checked_step(engine):
            assert delta.token is not None
            answers.setdefault((delta.request, delta.index), []).append(delta.token)
    assert checked_step(engine) == []
    assert engine.scheduler.pool.free == engine.scheduler.pool.usable
    assert engine.scheduler.swapped_pages == 0
    return answers


@pytest.mark.parametrize("step_tokens", [96, 512])
def test_a_common_prefix_is_computed_once(step_tokens: int, start: Start, watch_plans: WatchPlans) -> None:
    """64 requests at once, whatever of the prefix fits into a step."""
    engine = start(step_tokens=step_tokens, max_sequences=64)
    plans = watch_plans(engine)
    prefix = prompt_of(192)
    for number in range(64):
        engine.add([*prefix, *prompt_of(5, seed=number)], greedy(3))
    answers = finish(engine)
    assert len(answers) == 64
    assert all(len(answer) == 3 for answer in answers.values())
    assert sum(plan.tokens for plan in plans) == 192 + 64 * (5 + 2)  # the last token of an answer is not computed
    assert engine.scheduler.reused_tokens == 63 * 192
    assert engine.scheduler.prompt_tokens == 64 * 197
    assert engine.scheduler.preemptions == 0


def test_without_sharing_it_is_computed_by_everybody(start: Start, watch_plans: WatchPlans) -> None:
    engine = start(share_prefixes=False)
    plans = watch_plans(engine)
    for _ in range(8):
        engine.add(prompt_of(100), greedy(3))
    answers = finish(engine)
    assert len({tuple(answer) for answer in answers.values()}) == 1
    assert sum(plan.tokens for plan in plans) == 8 * (100 + 2)


def test_a_finished_request_leaves_its_prefix_behind(start: Start) -> None:
    """Prompt and answer alike, as in a conversation; the last token of an answer was never computed."""
    engine = start()
    first = engine.add(prompt_of(100), greedy(28))
    answer = finish(engine)[first.id, 0]
    second = engine.add([*first.prompt, *answer, *prompt_of(9, seed=1)], greedy(4))
    again = engine.add(first.prompt, greedy(28))
    answers = finish(engine)
    assert second.sequences[0].num_reused == 112  # of 127 tokens with keys and values, those in full pages of 16
    assert again.sequences[0].num_reused == 96
    assert answers[again.id, 0] == answer


def test_equal_pages_behind_other_tokens_are_not_shared(start: Start) -> None:
    """What a page holds depends on everything in front of it."""
    engine = start()
    x, y, z = (prompt_of(16, seed=number) for number in range(3))
    engine.add([*x, *y, 5], greedy(4))
    finish(engine)
    for prompt, reused in (([*y, 5], 0), ([*z, *y, 5], 0), ([*x, *x, *y, 5], 16), ([*x, *y, 6], 32)):
        request = engine.add(prompt, greedy(4))
        answer = finish(engine)[request.id, 0]
        assert request.sequences[0].num_reused == reused
        fresh = start(share_prefixes=False)
        alone = fresh.add(prompt, greedy(4))
        assert finish(fresh)[alone.id, 0] == answer


@pytest.mark.parametrize(("overlap", "share_prefixes"), EACH_ONCE)
def test_pages_are_full_at_saturation(
    share_prefixes: bool, overlap: bool, start: Start, watch_plans: WatchPlans
) -> None:
    """While somebody waits for pages alone, 95 % of them are in use. Of those, `check_integrity` says, a sequence's are
    full of its tokens but for the last one."""
    engine = start(max_sequences=32, kv_tokens=1024, max_context=128, share_prefixes=share_prefixes, overlap=overlap)
    scheduler, pool, budget = engine.scheduler, engine.scheduler.pool, engine.options.budget
    shares_in_use: list[float] = []

    def measure(plan: StepPlan) -> None:
        if scheduler.waiting and plan.tokens < budget and len(scheduler.running) < 32:
            shares_in_use.append(1 - pool.free / pool.usable)

    watch_plans(engine, measure)
    random = Random(0)
    for number in range(192):
        engine.add(prompt_of(random.randint(4, 40), seed=number), greedy(random.randint(4, 40)))
    finish(engine)
    assert len(shares_in_use) > 100
    assert min(shares_in_use) >= 0.95


@pytest.mark.parametrize("share_prefixes", [False, True])
@overlapped_or_not
@pytest.mark.parametrize(
    ("step_tokens", "computed", "copies"),
    [
        pytest.param(40, 40 + 3 * 1, 3, id="after the prompt"),  # the last page is copied, the last token computed
        pytest.param(512, 40 + 3 * 8, 0, id="beside the prompt"),  # full pages only: the last one is being written
    ],
)
def test_n_answers_share_their_prompt(
    step_tokens: int,
    computed: int,
    copies: int,
    overlap: bool,
    share_prefixes: bool,
    start: Start,
    watch_plans: WatchPlans,
) -> None:
    engine = start(step_tokens=step_tokens, share_prefixes=share_prefixes, overlap=overlap)
    alone = engine.add(prompt_of(40), greedy(12))
    wanted = finish(engine)[alone.id, 0]
    engine.scheduler.pool.reset_contents()
    plans = watch_plans(engine)
    request = engine.add(prompt_of(40), greedy(12, n=4))
    answers = finish(engine)
    assert answers == {(request.id, index): wanted for index in range(4)}
    assert sum(plan.tokens for plan in plans) == computed + 4 * 11
    assert sum(len(plan.copies) for plan in plans) == copies


@overlapped_or_not
def test_n_random_answers_are_those_of_their_seeds(overlap: bool, start: Start) -> None:
    """Whether pages are shared, copied or computed changes no answer."""
    random = {"temperature": 1.0, "seed": 7}
    engine = start(step_tokens=40, overlap=overlap)
    together = engine.add(prompt_of(40), greedy(12, n=4, **random))
    answers = finish(engine)
    assert len({tuple(answer) for answer in answers.values()}) == 4
    for index in range(4):
        alone = engine.add(prompt_of(40), greedy(12, **random | {"seed": 7 + index}))
        assert finish(engine)[alone.id, 0] == answers[together.id, index]


def pages_of(request: Request) -> list[int]:
    return [page for sequence in request.sequences for page in sequence.pages]


@pytest.mark.parametrize(("overlap", "swaps"), EACH_ONCE)
def test_an_abort_frees_pages_at_once(overlap: bool, swaps: bool, start: Start) -> None:
    """At random moments, whether the request waits, is in its prompt or answers; others do not notice."""
    options = {"kv_tokens": 256, "max_context": 96, "max_sequences": 8, "step_tokens": 32}
    undisturbed = start(**options)
    random = Random(1)
    params = [greedy(random.randint(1, 24), n=random.choice((1, 1, 2))) for _ in range(40)]
    prompts = [prompt_of(random.randint(1, 60), seed=number) for number in range(40)]
    for prompt, one in zip(prompts, params, strict=True):
        undisturbed.add(prompt, one)
    wanted = finish(undisturbed)

    engine = start(**options, overlap=overlap, swap_gib=0.001 * swaps)
    pool = engine.scheduler.pool
    answers: dict[tuple[int, int], list[int]] = {}
    aborted: set[int] = set()
    states: set[str] = set()
    requests = [engine.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    while engine.unfinished:
        for delta in checked_step(engine):
            assert delta.request not in aborted
            assert delta.token is not None
            answers.setdefault((delta.request, delta.index), []).append(delta.token)
        if engine.requests and len(aborted) < 20 and random.random() < 0.3:
            living = [request for request in requests if request.id in engine.requests]
            request = random.choice(living[:8])
            held = {page for other in living if other is not request for page in pages_of(other)}
            freed = len(set(pages_of(request)) - held)
            states.add(state_of(request))
            before = pool.free
            engine.abort(request.id)
            engine.check_integrity()
            assert pool.free == before + freed
            assert request.finished
            aborted.add(request.id)
    assert checked_step(engine) == []
    assert pool.free == pool.usable
    assert engine.scheduler.swapped_pages == 0
    assert states == {"waits", "is in its prompt", "answers"}
    assert {key: answer for key, answer in wanted.items() if key[0] not in aborted} == {
        key: answer for key, answer in answers.items() if key[0] not in aborted
    }


@overlapped_or_not
@pytest.mark.parametrize("index", [0, 1])
def test_one_of_several_answers_ends(overlap: bool, index: int, start: Start) -> None:
    """Its own pages are free at once, also where the others share those of its prompt; they do not notice."""
    options = {"kv_tokens": 256, "max_context": 96, "max_sequences": 2, "overlap": overlap}  # one of three waits
    prompt, params = prompt_of(40), greedy(20, n=3, temperature=1.0, seed=1)
    undisturbed = start(**options)
    undisturbed.add(prompt, params)
    wanted = finish(undisturbed)

    engine = start(**options)
    request = engine.add(prompt, params)
    while len(request.sequences[index].answer) < 5:
        checked_step(engine)
    others = [sequence for sequence in request.sequences if sequence is not request.sequences[index]]
    freed = set(request.sequences[index].pages) - {page for other in others for page in other.pages}
    before = engine.scheduler.pool.free
    engine.abort(request.id, index)
    engine.abort(request.id, index)
    engine.check_integrity()
    assert engine.scheduler.pool.free == before + len(freed)
    assert not request.finished
    finish(engine)
    assert engine.unfinished == 0
    answers = [sequence.answer for sequence in request.sequences]
    assert len(answers[index]) == 5
    assert [answer for at, answer in enumerate(answers) if at != index] == [
        wanted[request.id, at] for at in range(3) if at != index
    ]


def state_of(request: Request) -> str:
    first = request.sequences[0]
    if not first.pages:
        return "waits"
    return "answers" if first.num_computed >= len(first.prompt) else "is in its prompt"


def test_abort_of_nothing(start: Start) -> None:
    """Before the first step, twice, after the end, and for a number that never was."""
    engine = start()
    request = engine.add(prompt_of(40), greedy(2))
    engine.abort(request.id)
    engine.abort(request.id)
    engine.abort(12345)
    assert request.finished
    assert engine.unfinished == 0
    done = engine.add(prompt_of(40), greedy(2))
    finish(engine)
    engine.abort(done.id)
    assert done.sequences[0].finish_reason == "length"
    engine.check_integrity()


def test_better_priority_overtakes_within_its_seconds(start: Start) -> None:
    engine = start(max_sequences=1)
    running = engine.add(prompt_of(20), greedy(4), arrived=0.0)
    engine.step()
    plain = engine.add(prompt_of(20, 1), greedy(2), arrived=1.0)
    in_time = engine.add(prompt_of(20, 2), greedy(2), priority=-1, arrived=1.0 + 0.9 * PRIORITY_SECONDS)
    too_late = engine.add(prompt_of(20, 3), greedy(2), priority=-1, arrived=1.0 + 1.1 * PRIORITY_SECONDS)
    worse = engine.add(prompt_of(20, 4), greedy(2), priority=2, arrived=0.5)
    order = list(dict.fromkeys(request for request, _ in finish(engine)))
    assert order == [running.id, in_time.id, plain.id, too_late.id, worse.id]


@overlapped_or_not
@pytest.mark.parametrize("priority", [0, -1], ids=["behind", "in front"])
def test_a_long_prompt_does_not_stall_answers(
    overlap: bool, priority: int, start: Start, watch_plans: WatchPlans
) -> None:
    """Every step has a token for each running answer and fills its budget with the prompt."""
    engine = start(step_tokens=16, overlap=overlap)
    plans = watch_plans(engine)
    answering = [engine.add(prompt_of(3, seed=number), greedy(60)) for number in range(4)]
    for _ in range(4):
        engine.step()
    long = engine.add(prompt_of(200), greedy(2), priority=priority)
    plans.clear()
    served: list[set[int]] = []  # the requests that got a token, by step
    while not served or long.id not in served[-1]:
        served.append({delta.request for delta in checked_step(engine)})
    assert all({request.id for request in answering} <= step for step in served)
    assert len(served) == -(-200 // 12) + overlap
    assert all(plan.tokens == 16 for plan in plans[: 200 // 12])
    finish(engine)


def test_the_first_to_come_is_never_preempted(start: Start) -> None:
    """Whoever gives way is the last one, so that everybody ends."""
    engine = start(kv_tokens=128, max_context=112, max_sequences=8)
    requests = [engine.add(prompt_of(10, seed=number), greedy(90), arrived=number) for number in range(6)]
    answers = finish(engine)
    assert all(len(answer) == 90 for answer in answers.values())
    counts = [request.sequences[0].num_preemptions for request in requests]
    assert counts[0] == 0
    assert engine.scheduler.preemptions == sum(counts) > 0


def test_swapping_out_when_nobody_else_computes(start: Start) -> None:
    """The last token of the first answer is on its way while the second one needs a page: that step computes nothing,
    but the pages must still get to the host."""
    answers = []
    for options in ({"swap_gib": 0.001, "overlap": True, "kv_tokens": 48}, {}):
        engine = start(max_context=48, share_prefixes=False, **options)
        engine.add(prompt_of(30), greedy(2))
        engine.add(prompt_of(15, seed=1), greedy(8))
        answers.append(finish(engine))
    assert answers[0] == answers[1]


def test_swapped_pages_come_back(start: Start, watch_plans: WatchPlans) -> None:
    """Answers are those of a roomy pool, and nothing is computed twice."""
    prompts = [prompt_of(14, seed=number) for number in range(6)]
    found = []
    for options in ({"swap_gib": 0.01, "kv_tokens": 128}, {}):
        engine = start(max_context=96, share_prefixes=False, **options)
        plans = watch_plans(engine)
        for prompt in prompts:
            engine.add(prompt, greedy(60))
        found.append(finish(engine))
        assert sum(plan.tokens for plan in plans) == 6 * (14 + 59)
        assert (sum(len(plan.swap_in) for plan in plans) > 0) == bool(options)
    assert found[0] == found[1]
