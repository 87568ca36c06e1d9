"""Spending a budget of bits: never over it, and as good as trying everything."""

import itertools
import random

import pytest

from quantkit.methods import budget
from quantkit.methods.budget import Option, allocate


def random_groups(seed: int, step: int) -> list[list[Option]]:
    dice = random.Random(seed)
    return [
        [Option(step * dice.randint(1, 40), dice.random() ** 3) for _ in range(dice.randint(1, 4))] for _ in range(6)
    ]


def cost(groups: list[list[Option]], chosen: list[int]) -> tuple[int, float]:
    taken = [options[index] for options, index in zip(groups, chosen, strict=True)]
    return sum(option.bits for option in taken), sum(option.loss for option in taken)


def by_brute_force(groups: list[list[Option]], limit: int) -> float:
    every = itertools.product(*(range(len(options)) for options in groups))
    costs = (cost(groups, list(chosen)) for chosen in every)
    return min(loss for bits, loss in costs if bits <= limit)


@pytest.mark.parametrize("seed", range(12))
def test_equals_brute_force(seed: int) -> None:
    groups = random_groups(seed, step=64)
    least = sum(min(option.bits for option in options) for options in groups)
    most = sum(max(option.bits for option in options) for options in groups)
    for limit in (least, (least + most) // 2, most, most + 1000):
        bits, loss = cost(groups, allocate(groups, limit))
        assert bits <= limit
        assert loss == pytest.approx(by_brute_force(groups, limit))


def test_a_coarse_table_stays_under_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes without a common divisor, and a table too small to hold them exactly."""
    monkeypatch.setattr(budget, "UNITS", 50)
    for seed in range(8):
        groups = random_groups(seed, step=1)
        groups = [[Option(997 * option.bits + 1, option.loss) for option in options] for options in groups]
        limit = sum(min(option.bits for option in options) for options in groups) + 997 * 120
        bits, loss = cost(groups, allocate(groups, limit))
        assert bits <= limit
        assert loss <= 1.3 * by_brute_force(groups, int(0.85 * limit)) + 1e-9
