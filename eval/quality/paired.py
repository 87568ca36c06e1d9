"""Two measurements of the same windows, told apart by what differs in each window."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.divergence import perplexity_of
from quantkit.eval.quality.bootstrap import Interval, paired_difference
from quantkit.eval.quality.measure import QualityResult


def kl_difference(one: QualityResult, other: QualityResult) -> Interval | None:
    """KL divergence of one above the other's, nats per token; None where they cannot be paired."""
    return _difference(one, other, one.window_kl, other.window_kl)


def perplexity_quotient(one: QualityResult, other: QualityResult) -> Interval | None:
    """Perplexity of one over the other's; None where they cannot be paired."""
    found = _difference(one, other, one.window_losses, other.window_losses)
    return None if found is None else found.scaled(perplexity_of)


def _difference(
    one: QualityResult, other: QualityResult, ones: Sequence[float] | None, others: Sequence[float] | None
) -> Interval | None:
    """The protocol names the text, the windows and their size. All windows have as many tokens, so means of means are
    means over tokens."""
    if ones is None or others is None or one.protocol != other.protocol or len(ones) != len(others):
        return None
    return paired_difference(ones, others, one.seed)
