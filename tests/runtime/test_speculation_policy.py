"""How many tokens to guess: what pays by the measured costs, and nothing where nothing pays."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quantkit.runtime.core.sampling_params import SamplingParams
from quantkit.runtime.core.sequence import Sequence
from quantkit.runtime.engine.speculation_policy import Policy
from quantkit.runtime.engine.step_costs import Costs


def sequences(count: int) -> list[Sequence]:
    return [Sequence(number, [1], SamplingParams(), 0.0, 0, 100) for number in range(count)]


def memory_bound(draft: float = 0.1) -> Costs:
    """A GPU: a step takes 2 ms up to 64 tokens, and in proportion beyond."""
    costs = Costs({(size, 1): 0.002 * max(1.0, size / 64) for size in (1, 2, 4, 8, 64, 128, 256, 512)})
    for size in (1, 2, 8, 40, 64, 128):
        for guesses in (0, 1, 2, 3, 4, 6, 8):
            verify = 0.002 * max(1.0, size * (1 + guesses) / 64)
            for _ in range(2):  # the first is not believed
                costs.observe(size, guesses, verify + guesses * draft * 0.002)
    return costs


def settled(policy: Policy, running: list[Sequence], acceptance: float, steps: int = 200) -> list[dict[int, int]]:
    """Steps with guesses that are right with this probability."""
    dice, found = random.Random(3), []
    for _ in range(steps):
        lengths = policy.lengths(running)
        found.append(lengths)
        tokens = len(running)
        for sequence in running if lengths else []:
            asked, right = lengths.get(sequence.id, 0), 0
            while right < asked and dice.random() < acceptance:
                right += 1
            if asked:
                policy.see(sequence, asked, right)
            tokens += right
        account(policy, len(running), max(lengths.values(), default=0), tokens)
    return found


def account(policy: Policy, count: int, guesses: int, tokens: int) -> None:
    """As `Speculation.end` does, for a step that took what such steps take."""
    plain, seconds = policy.costs.estimate(count, 0), policy.costs.estimate(count, guesses)
    assert plain is not None
    assert seconds is not None
    policy.account(seconds / plain, seconds / plain - tokens / count if guesses else 0.0)


@pytest.mark.parametrize(("acceptance", "low", "high"), [(0.95, 6, 8), (0.8, 3, 6), (0.5, 1, 3)])
def test_good_guesses_make_long_drafts(acceptance: float, low: int, high: int) -> None:
    found = settled(Policy(8, memory_bound()), sequences(1), acceptance)[100:]
    typical = sorted(lengths[0] for lengths in found if lengths)
    assert low <= typical[len(typical) // 2] <= high


def test_bad_guesses_are_left_alone_and_tried_again() -> None:
    policy = Policy(8, memory_bound(0.3))
    found = settled(policy, sequences(1), 0.02, 1000)[100:]
    tried = sum(bool(lengths) for lengths in found)
    assert 1 <= tried < 0.1 * len(found)
    better = settled(policy, sequences(1), 0.95, 2000)
    assert sum(bool(lengths) for lengths in better[-100:]) > 90


def test_a_look_waits_until_somebody_can_guess() -> None:
    """Steps overlap while nobody guesses: the first draft comes when the tokens on their way have come back."""
    policy, running = Policy(4, memory_bound()), sequences(1)
    settled(policy, running, 0.0, 60)
    asked = []
    for _ in range(400):  # nothing is verified meanwhile
        lengths = policy.lengths(running)
        asked.append(bool(lengths))
        if not lengths:
            account(policy, 1, 0, 1)
    first = asked.index(True)
    assert all(asked[first:])
    for _ in range(30):
        policy.see(running[0], 1, 0)
        account(policy, 1, 1, 1)
    assert policy.lengths(running) == {}


def test_a_look_judges_by_what_it_sees() -> None:
    """Not by what was long before: guesses were bad, now they are good, and one look is enough to go on."""
    policy, running = Policy(4, graph_costs(), alike=True), sequences(8)
    for _ in range(3):
        policy.costs.observe(8, 0, 2.42e-3)
    settled(policy, running, 0.05, 200)
    assert policy.lengths(running) == {}
    good = [bool(lengths) for lengths in settled(policy, running, 0.9, 400)]
    assert all(good[good.index(True) :])


def test_a_look_asks_those_who_make_it_cheapest() -> None:
    """A draft model reads all that they said, which takes longer than all else; the others follow good news only."""
    unread = {number: 500 + number for number in range(40)} | {7: 3, 30: 5}
    policy = Policy(4, memory_bound(), unread=lambda sequence: unread[sequence.id])
    policy.costs = Costs({(40, 1): 0.002, (40, 2): 0.0021}, {(40, 1): 0.0002})
    for _ in range(2):
        policy.costs.observe(40, 0, 0.002)
        policy.costs.observe(40, 1, 0.0023)
    running = sequences(40)
    assert list(policy.lengths(running)) == [7, 30]
    for guesses in (0, 1):
        for number in (7, 30):
            policy.see(running[number], 1, guesses)
    assert len(policy.lengths(running)) == 2  # one of two was right: too little to read 20,000 tokens
    for _ in range(12):
        for number in (7, 30):
            policy.see(running[number], 1, 1)
    assert len(policy.lengths(running)) == 40


def test_what_must_be_read_has_to_pay_back() -> None:
    """Nobody reads 30,000 tokens for the last few of an answer, however good guesses may be."""
    costs = Costs({(1, 1): 0.002, (1, 2): 0.0021}, {(1, 1): 0.0002})
    for _ in range(2):
        costs.observe(1, 0, 0.002)
    for length, asked in ((4, False), (100, False), (100_000, True)):
        one = Sequence(0, [1], SamplingParams(), 0.0, 0, length)
        policy = Policy(4, costs, unread=lambda sequence: 30_000 if sequence.max_new < 1000 else 30)
        assert bool(policy.lengths([one])) == asked


def test_the_budget_bounds_what_looks_lose() -> None:
    """Guesses that are never right, tried as often as the budget allows: an allowance, and one percent."""
    policy, running = Policy(4, memory_bound(0.3)), sequences(8)
    found = settled(policy, running, 0.0, 4000)
    seconds = [policy.costs.estimate(8, max(lengths.values(), default=0)) for lengths in found]
    plain = policy.costs.estimate(8, 0)
    assert plain is not None
    lost = sum(each for each in seconds if each is not None) / plain - len(found)
    assert any(found[200:])
    assert 0 < lost < 2 + 0.01 * len(found)


def test_a_step_that_captured_a_graph_says_nothing() -> None:
    graphs = {(1, 1): 0.002}
    costs = Costs(graphs)
    costs.observe(1, 1, 0.004)  # the first of its kind
    graphs[1, 2] = 0.002
    costs.observe(1, 1, 0.5)
    costs.observe(1, 1, 0.003)
    assert costs.estimate(1, 1) == pytest.approx(0.003)


def test_trials_take_one_percent_of_the_time() -> None:
    """Good guesses would pay for a step that takes 1.75 times as long; what bad ones cost is spread over many."""
    costs = Costs()
    for _ in range(2):
        costs.observe(8, 0, 0.002)
        costs.observe(8, 1, 0.0035)
    running = sequences(8)
    policy = Policy(1, costs)
    found = settled(policy, running, 0.1, 3000)[200:]
    tried = sum(bool(lengths) for lengths in found)
    assert 0 < tried * 0.75 < 0.012 * len(found)


def test_a_small_model_whose_steps_wait_for_the_host_is_guessed_for() -> None:
    """A plain step takes 1.2 ms, its graph 0.3: a line from one to the other would say that five tokens take many."""
    costs = Costs({(size, 1): 0.0003 for size in (1, 2, 4, 8)}, {(8, 1): 0.0002})
    for _ in range(2):
        costs.observe(8, 0, 0.0012)
    assert costs.estimate(8, 4) == pytest.approx(0.0012 + 4 * 0.0002)
    assert Policy(4, costs).lengths(sequences(8))


def test_a_large_batch_is_not_guessed_for() -> None:
    found = settled(Policy(8, memory_bound()), sequences(128), 0.8, 300)
    assert not any(found)


def test_the_best_length_is_the_fastest_by_arithmetic() -> None:
    """With acceptance a and a draft of relative cost c, (1 - a^(k+1)) / ((1 - a)(k c + 1)) is largest."""
    for acceptance, draft in ((0.9, 0.05), (0.7, 0.1), (0.6, 0.3)):
        policy = Policy(8, memory_bound(draft), adaptive=True)
        running = sequences(1)
        settled(policy, running, acceptance, 400)
        record = policy._record(running[0])
        a = record.acceptance
        speed = {k: (1 - a ** (k + 1)) / ((1 - a) * (k * draft + 1)) for k in (1, 2, 3, 4, 6, 8)}
        best, gain = policy._best(1, [record])
        assert gain == pytest.approx(max(speed.values()), rel=0.001)
        assert speed[best] == pytest.approx(gain, rel=0.001)


def test_every_sequence_has_its_own_length() -> None:
    policy, running = Policy(8, memory_bound()), sequences(2)
    dice = random.Random(1)
    for _ in range(300):
        lengths, tokens = policy.lengths(running), 2
        for sequence, acceptance in zip(running, (0.95, 0.1), strict=True):
            asked, right = lengths.get(sequence.id, 0), 0
            while right < asked and dice.random() < acceptance:
                right += 1
            if asked:
                policy.see(sequence, asked, right)
            tokens += right
        account(policy, 2, max(lengths.values(), default=0), tokens)
    lengths = policy.lengths(running)
    assert lengths[0] >= 4
    assert lengths[1] <= 2


def test_a_tree_brings_no_more_than_its_depth() -> None:
    """Twelve nodes that are three deep bring what three guesses in a row do, and cost more."""
    for deepest, best in ((16, 12), (3, 3)):
        policy = Policy(12, memory_bound(), alike=True, deepest=deepest)
        assert policy._best(1, [replace(policy._record(sequences(1)[0]), right=0.99)])[0] == best


def test_fixed_lengths() -> None:
    policy = Policy(5, Costs(), adaptive=False)
    assert policy.lengths(sequences(3)) == {0: 5, 1: 5, 2: 5}
    assert policy.lengths([]) == {}


def test_nothing_is_guessed_before_a_plain_step_was_timed() -> None:
    policy = Policy(4, Costs())
    assert policy.lengths(sequences(1)) == {}
    for _ in range(2):
        policy.costs.observe(1, 0, 0.01)
    assert policy.lengths(sequences(1))


def test_a_slow_measurement_does_no_harm() -> None:
    """Such as the first step of a size, which compiles kernels."""
    costs = Costs()
    for seconds in (3.0, 0.01):
        costs.observe(1, 0, seconds)
    assert costs.estimate(1, 0) == pytest.approx(0.01)
    for seconds in (2.0, 0.011, 0.012):
        costs.observe(1, 0, seconds)
    assert costs.estimate(1, 0) == pytest.approx(0.0115)


def test_estimates_between_what_is_known() -> None:
    costs = Costs({(1, 1): 0.002, (64, 1): 0.002, (128, 1): 0.004}, {(1, 2): 0.003, (1, 4): 0.004})
    assert costs.estimate(16, 0) == pytest.approx(0.002)
    assert costs.estimate(96, 0) == pytest.approx(0.003)
    assert costs.estimate(256, 0) == pytest.approx(0.008)  # on the last line
    assert costs.estimate(1, 2) == pytest.approx(0.002 + 2 * 0.001)
    assert costs.estimate(32, 3) == pytest.approx(0.004 + 3 * 0.001)
    assert Costs().estimate(1, 0) is None
    assert Costs({(8, 1): 0.002}).estimate(128, 0) == pytest.approx(0.004)


def test_what_a_step_takes_beside_its_parts_is_learned_from_similar_ones() -> None:
    """Host and sampling are no part of any graph: one number of guesses tells of the others, one size of the next."""
    costs = Costs({(8, 1): 0.002, (8, 2): 0.0021, (8, 5): 0.003}, {(8, 1): 0.0008, (8, 4): 0.0032})
    for _ in range(2):
        costs.observe(8, 0, 0.0024)
    assert costs.estimate(8, 4) == pytest.approx(0.0024 + 0.001 + 0.0032)
    assert not costs.has_guesses(8)
    for _ in range(4):
        costs.observe(8, 1, 0.0024 + 0.0001 + 0.0008 + 0.0005)
    assert costs.has_guesses(8)
    assert costs.estimate(8, 4) == pytest.approx(0.0024 + 0.001 + 0.0032 + 0.0005)


def test_time_saves_for_a_look_at_a_long_prompt() -> None:
    """Reading it costs 20 plain steps, which one percent of 2,000 pays for; and then no more is lost than its price."""
    costs = Costs({(1, 1): 0.002, (1, 2): 0.0021}, {(1, 1): 0.0002})
    for _ in range(2):
        costs.observe(1, 0, 0.002)
        costs.observe(1, 1, 0.0033)
    policy = Policy(4, costs, unread=lambda sequence: 20_000)
    one = Sequence(0, [1], SamplingParams(), 0.0, 0, 100_000)
    steps = 0
    while not policy.lengths([one]):
        account(policy, 1, 0, 1)
        steps += 1
    assert 1800 < steps < 2500
    lost = 0.0
    policy.account(20.0, 20.0)
    while policy.lengths([one]):
        policy.see(one, 1, steps % 2)  # neither good nor bad
        account(policy, 1, 1, 1 + steps % 2)
        lost += 0.65 - steps % 2
        steps += 1
    assert lost < 5


# About what a step of 8 requests to an 8B model in W4 with a 1B draft takes on an H200, in milliseconds by guesses (0
# and 4 were measured), and what a change costs.
STEP = {0: 2.54, 1: 4.3, 2: 5.3, 3: 6.4, 4: 7.57}
FIRST_GUESSES, LONGER = 4.0, 0.4


def tokens_per_second(policy: Policy, acceptance: float, seed: int) -> float:
    """Two rounds of 8 answers of 256 tokens, the first to learn in; a step costs what its longest draft costs."""
    dice, now, tokens = random.Random(seed), 0.0, 0
    for round_ in range(2):
        left, last = dict.fromkeys(range(8), 256), 0
        running = [Sequence(8 * round_ + number, [1], SamplingParams(), 0.0, 0, 300) for number in left]
        now, tokens = 0.0, 0
        while left:
            live = [sequence for number, sequence in enumerate(running) if number in left]
            lengths = policy.lengths(live)
            guesses = max(lengths.values(), default=0)
            took = STEP[guesses] * dice.uniform(0.97, 1.03) * (1.5 if dice.random() < 0.05 else 1.0)
            if guesses > last:
                took += LONGER * guesses if last else FIRST_GUESSES
            if bool(guesses) == bool(last):
                policy.costs.observe(len(live), guesses, took * 1e-3)
            before = tokens
            for sequence in live:
                asked, right = lengths.get(sequence.id, 0), 0
                while right < asked and dice.random() < acceptance:
                    right += 1
                if asked:
                    policy.see(sequence, asked, right)
                left[sequence.id % 8] -= right + 1
                tokens += right + 1
                if left[sequence.id % 8] <= 0:
                    del left[sequence.id % 8]
                    policy.forget(sequence)
            now, last = now + took, guesses
            plain = policy.costs.estimate(len(live), 0)
            if plain is not None:
                steps = took * 1e-3 / plain
                policy.account(steps, steps - (tokens - before) / len(live) if guesses else 0.0)
    return 1e3 * tokens / now


def graph_costs() -> Costs:
    steps = {(8, 1): 2.13e-3, (8, 2): 2.25e-3, (8, 3): 2.59e-3, (8, 4): 2.9e-3, (8, 5): 3.35e-3}
    return Costs(steps, {(8, 1): 0.8e-3, (8, 2): 1.63e-3, (8, 3): 2.4e-3, (8, 4): 3.2e-3})


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.8, 0.9, 0.95])
def test_close_to_the_best_fixed_number_where_steps_are_graphs(acceptance: float) -> None:
    """Drafts of different lengths in one step lose up to a quarter here."""
    seeds = range(6)
    fixed = [8e3 / STEP[0] * 0.975]  # plain steps are now and then slow too
    for most in (1, 2, 4):
        found = [tokens_per_second(Policy(most, graph_costs(), adaptive=False), acceptance, seed) for seed in seeds]
        fixed.append(sum(found) / len(found))
    adaptive = [tokens_per_second(Policy(4, graph_costs(), alike=True), acceptance, seed) for seed in seeds]
    assert sum(adaptive) / len(adaptive) > 0.95 * max(fixed)
