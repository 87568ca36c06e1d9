"""Speculation that never costs: adaptive over plain decoding on a simulated GPU (tests/support/simulated_gpu.py)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from quantkit.runtime.core.sampling_params import SamplingParams
from simulated_gpu import BATCHES, CHANCES, decode, simulated_engine
from simulated_machines import H200_8B, H200_SMALL, MACHINES, Machine

# Milliseconds of a step with so many guesses, of eval/results/speculative.csv: tokens_per_step over tokens_per_second.
MEASURED = {(1, 0): 2.35, (1, 1): 3.5, (1, 2): 4.4, (1, 4): 5.6, (8, 0): 2.43, (8, 1): 3.8, (8, 2): 5.0, (8, 4): 7.4}

SLOW_DRAFT = replace(H200_8B, name="a draft as large as the model", draft=H200_8B.step)


@cache
def plain(machine: Machine, batch: int, new: int = 256) -> float:
    return decode(simulated_engine(machine, 0), batch, 0.0, new=new)


@pytest.mark.parametrize(("batch", "guesses"), MEASURED)
def test_the_machine_is_the_one_that_was_measured(batch: int, guesses: int) -> None:
    made = simulated_engine(H200_8B, guesses, adaptive=False)
    speed = decode(made, batch, 0.9)
    tokens = 1 + made.engine.speculation.accepted / max(1, made.engine.speculation.steps)
    assert 1e3 * batch * tokens / speed == pytest.approx(MEASURED[batch, guesses], rel=0.12)


def floor(machine: Machine, batch: int, chance: float, count: int = 2, **sizes: int) -> list[float]:
    """Of the first engine run, which knows nothing, and of later ones."""
    made = simulated_engine(machine, 4)
    found = [decode(made, batch, chance, seed=seed, **sizes) for seed in range(count)]
    return [speed / plain(machine, batch, **sizes) for speed in found]


@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.parametrize(("machine", "batch"), [(H200_8B, 1), (H200_8B, 8), (H200_SMALL, 8)])
def test_guessing_costs_at_most_two_percent(machine: Machine, batch: int, chance: float) -> None:
    assert min(floor(machine, batch, chance)) > 0.98


@pytest.mark.long
@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_guessing_costs_at_most_two_percent_anywhere(machine: Machine, batch: int, chance: float) -> None:
    found = floor(machine, batch, chance, count=4)
    assert sum(found) / len(found) > 0.98
    assert min(found) > 0.965


def test_good_guesses_are_used() -> None:
    """The floor is not bought by never guessing: nearly what the best fixed number brings."""
    for batch, chance, least in ((1, 0.9, 1.4), (8, 0.9, 1.35), (8, 0.8, 1.17)):
        found = floor(H200_8B, batch, chance)
        assert sum(found) / len(found) > least


@pytest.mark.parametrize(
    ("machine", "chance", "read"), [(H200_8B, 0.9, True), (H200_8B, 0.05, False), (SLOW_DRAFT, 0.9, False)]
)
def test_the_draft_reads_prompts_where_guesses_pay(machine: Machine, chance: float, read: bool) -> None:
    made = simulated_engine(machine, 4)
    decode(made, 8, chance)
    before = made.part.read
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
    made.engine.add([7] * 512, params, arrived=0.0)
    while made.engine.unfinished:
        made.engine.step()
    made.engine.drain()
    assert (made.part.read - before >= 512) == read


def test_the_draft_reads_shared_pages_that_it_has_not_filled() -> None:
    """A conversation whose beginning came while nobody guessed; the next one finds it read."""
    made = simulated_engine(H200_8B, 2, sequences=1, context=512, share_prefixes=True)
    made.engine.speculation.force_acceptance(0.5)
    policy, params = made.engine.speculation._policy, SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)

    def answer(prompt: list[int]) -> int:
        before = made.part.read
        made.engine.add(prompt, params, arrived=0.0)
        while made.engine.unfinished:
            made.engine.step()
        made.engine.drain()
        return made.part.read - before

    prompt = [7, 8] * 100
    policy._failed, policy._quiet = 1, 1000
    assert answer(prompt) == 0
    policy._adaptive = False  # everybody is guessed for
    assert answer([*prompt, 9]) >= 192
    assert answer([*prompt, 9, 9]) < 32
    policy._adaptive = True
    assert answer([5, 6] * 245) == 0  # takes all pages
    assert answer(prompt) == 0
    policy._adaptive = False
    assert answer(prompt) >= 192
