"""How many tokens to guess: what pays by the measured costs, and nothing where nothing pays."""

from __future__ import annotations

import random

import pytest

from quantkit.runtime.params import SamplingParams
from quantkit.runtime.sequence import Sequence
from quantkit.runtime.speculation.costs import Costs
from quantkit.runtime.speculation.policy import Policy


def sequences(count: int) -> list[Sequence]:
    return [Sequence(number, [1], SamplingParams(), 0.0, 0, 100) for number in range(count)]


def memory_bound(draft: float = 0.1) -> Costs:
    """A GPU: a step takes 2 ms up to 64 tokens, and in proportion beyond."""
    costs = Costs({(size, 1): 0.002 * max(1.0, size / 64) for size in (1, 2, 4, 8, 64, 128, 256, 512)})
    for size in (1, 8, 64, 128):
        for guesses in (1, 2, 4, 8):
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
        for sequence in running if lengths else []:
            right = 0
            while right < lengths[sequence.id] and dice.random() < acceptance:
                right += 1
            policy.see(sequence, lengths[sequence.id], right)
    return found


@pytest.mark.parametrize(("acceptance", "low", "high"), [(0.95, 6, 8), (0.8, 3, 6), (0.5, 1, 3)])
def test_good_guesses_make_long_drafts(acceptance: float, low: int, high: int) -> None:
    found = settled(Policy(8, memory_bound()), sequences(1), acceptance)[100:]
    typical = sorted(lengths[0] for lengths in found if lengths)
    assert low <= typical[len(typical) // 2] <= high


def test_bad_guesses_are_left_alone_and_tried_again() -> None:
    policy = Policy(8, memory_bound())
    found = settled(policy, sequences(1), 0.02, 600)[100:]
    tried = sum(bool(lengths) for lengths in found)
    assert 1 <= tried < 0.1 * len(found)
    better = settled(policy, sequences(1), 0.95, 2000)
    assert sum(bool(lengths) for lengths in better[-100:]) > 90


def test_a_trial_waits_until_somebody_can_guess() -> None:
    """Steps overlap while nobody guesses: the first draft comes when the tokens on their way have come back."""
    policy, running = Policy(4, memory_bound()), sequences(1)
    settled(policy, running, 0.0, 60)
    asked = [bool(policy.lengths(running)) for _ in range(300)]  # nothing is verified meanwhile
    first = asked.index(True)
    assert all(asked[first:])
    for _ in range(4):
        policy.see(running[0], 1, 0)
    assert policy.lengths(running) == {}


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
        speed = {k: (1 - a ** (k + 1)) / ((1 - a) * (k * draft + 1)) for k in (1, 2, 4, 8)}
        best = policy._best(1, [record])
        assert best in speed or best in (3, 6)
        assert speed.get(best, max(speed.values())) >= 0.97 * max(speed.values())


def test_every_sequence_has_its_own_length() -> None:
    policy, running = Policy(8, memory_bound()), sequences(2)
    dice = random.Random(1)
    for _ in range(300):
        lengths = policy.lengths(running)
        for sequence, acceptance in zip(running, (0.95, 0.1), strict=True):
            right = 0
            while lengths and right < lengths[sequence.id] and dice.random() < acceptance:
                right += 1
            policy.see(sequence, lengths.get(sequence.id, 0), right)
    lengths = policy.lengths(running)
    assert lengths[0] >= 4
    assert lengths[1] <= 2


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
