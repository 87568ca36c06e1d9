"""Confidence intervals: do they cover what they promise, and do they say nothing where they know nothing?"""

import pytest
import torch

from quantkit.eval.quality.bootstrap import Interval, Resamples, paired_difference

TRIALS = 400


@pytest.mark.parametrize("windows", [8, 12, 40])
def test_means_are_covered_as_promised(windows: int) -> None:
    """Skewed values, as losses are: the truth is inside about 95 times in 100, for few windows too."""
    generator = torch.Generator().manual_seed(windows)
    covered = 0
    for trial in range(TRIALS):
        values = torch.randn(windows, 4, generator=generator, dtype=torch.float64).square().sum(1)  # mean 4
        found = Resamples.draw(windows, trial).ratio(values, torch.ones_like(values))
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.value <= found.high
        covered += found.low <= 4 <= found.high
    assert 0.90 <= covered / TRIALS <= 0.99


def test_ratios_of_unequal_windows_are_covered() -> None:
    """Bits per byte: both sums are drawn together."""
    generator = torch.Generator().manual_seed(5)
    covered = 0
    for trial in range(TRIALS):
        sizes = torch.randint(500, 3000, (30,), generator=generator).double()
        sums = sizes * (0.7 + 0.1 * torch.randn(30, generator=generator, dtype=torch.float64))
        found = Resamples.draw(30, trial).ratio(sums, sizes)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.7 <= found.high
    assert 0.90 <= covered / TRIALS <= 0.99


def test_quantiles_are_those_of_all_tokens() -> None:
    values = torch.rand(13, 77, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for level in (0.5, 0.9, 0.99):
        found = Resamples.draw(13, 0).quantile(values, level)
        ordered = values.flatten().sort().values
        exact = ordered[-(-int(level * 10000) * len(ordered) // 10000) - 1]
        assert found.value == float(exact)
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.value <= found.high


def test_resampled_quantiles_equal_the_slow_way() -> None:
    """Draw windows, put their tokens together, sort: what the running counts stand for."""
    values = torch.rand(6, 50, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    resamples = Resamples.draw(6, 1)
    slow = []
    for counts in resamples.counts.long():
        drawn = values.repeat_interleave(counts, dim=0).flatten().sort().values
        slow.append(drawn[-(-99 * len(drawn) // 100) - 1])
    found = resamples.quantile(values, 0.99)
    assert found.low is not None
    assert found.high is not None
    assert min(slow) <= found.low
    assert found.high <= max(slow)
    assert found == resamples._interval(found.value, torch.stack(slow))


def test_the_seed_decides() -> None:
    values = torch.arange(10, dtype=torch.float64)
    one, same, other = (Resamples.draw(10, seed).ratio(values, torch.ones_like(values)) for seed in (0, 0, 1))
    assert one == same != other


def test_one_window_cannot_tell() -> None:
    found = Resamples.draw(1, 0).ratio(torch.tensor([6.0]).double(), torch.tensor([3.0]).double())
    assert found == Interval(2.0, None, None)
    assert found.text(".2f") == "2.00"
    assert found.scaled(lambda value: 2 * value) == Interval(4.0)
    assert Interval(1, 0.5, 2).text(".1f") == "1.0 [0.5, 2.0]"


def test_paired_differences_see_what_overlapping_intervals_hide() -> None:
    """Windows share their luck: separately neither value is known to 10 %, their difference of 2 % is clear."""
    hard = (0.1 + 0.05 * torch.randn(32, generator=torch.Generator().manual_seed(6), dtype=torch.float64)).tolist()
    worse = [value + 0.002 for value in hard]
    apart = [
        Resamples.draw(32, 0).ratio(torch.tensor(values).double(), torch.ones(32).double()) for values in (hard, worse)
    ]
    assert apart[0].overlaps(apart[1])
    found = paired_difference(worse, hard, 0)
    assert found.value == pytest.approx(0.002)
    assert not found.holds(0.0)
    assert paired_difference(hard, worse, 0).value == pytest.approx(-0.002)


def test_paired_differences_of_the_same_mean_hold_nothing_about_95_times_in_100() -> None:
    generator = torch.Generator().manual_seed(11)
    held = 0
    for trial in range(TRIALS):
        shared = torch.randn(16, generator=generator, dtype=torch.float64)
        ones, others = (shared + 0.1 * torch.randn(16, generator=generator, dtype=torch.float64) for _ in range(2))
        held += paired_difference(ones.tolist(), others.tolist(), trial).holds(0.0)
    assert 0.90 <= held / TRIALS <= 0.99


def test_both_agree_where_the_difference_is_larger_than_all_luck() -> None:
    low, high = [0.1, 0.12, 0.11, 0.09], [0.5, 0.52, 0.48, 0.51]
    ones = torch.ones(4).double()
    intervals = [Resamples.draw(4, 0).ratio(torch.tensor(values).double(), ones) for values in (low, high)]
    assert not intervals[0].overlaps(intervals[1])
    assert not paired_difference(low, high, 0).holds(0.0)
    assert paired_difference(low, low, 0) == Interval(0.0, 0.0, 0.0)


def test_one_pair_cannot_tell() -> None:
    found = paired_difference([2.0], [1.0], 0)
    assert found == Interval(1.0)
    assert not found.holds(1.0)
    assert found.upper == 1.0
    assert Interval(1.0, 0.5, 2.0).upper == 2.0
    assert Interval(1.0).overlaps(Interval(1.0, 0.0, 2.0))
    assert not Interval(1.0).overlaps(Interval(1.5, 0.0, 2.0))
