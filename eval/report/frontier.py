"""The frontier of size against loss: formats that no other one beats in both, by the values as they were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantkit.eval.compare.results import Comparison, FormatResult
from quantkit.eval.report.numbers import is_no_divergence
from quantkit.eval.report.rules import divergence_of

Costs = tuple[float, float]  # less of each is better


def unbeaten(points: Sequence[Costs]) -> list[bool]:
    """Of every point whether none of the others costs no more of both and less of one; equal points do not beat each
    other."""
    return [not any(_beats(other, point) for other in points) for point in points]


def weighed(comparison: Comparison) -> dict[str, FormatResult]:
    """The formats whose bytes and KL divergence are known; one that failed cannot be taken, so it beats none."""
    whole = (found for found in comparison.formats if found.error is None and found.size is not None)
    return {found.name: found for found in whole if math.isfinite(_loss(found))}


def frontier(comparison: Comparison) -> tuple[str, ...]:
    """Names in the order of the comparison; none where fewer than two formats can be weighed."""
    formats = weighed(comparison)
    if len(formats) < 2:
        return ()
    kept = unbeaten([(found.size.bytes if found.size else 0, _loss(found)) for found in formats.values()])
    return tuple(name for name, is_kept in zip(formats, kept, strict=True) if is_kept)


def _beats(one: Costs, other: Costs) -> bool:
    return one[0] <= other[0] and one[1] <= other[1] and one != other


def _loss(found: FormatResult) -> float:
    """KL divergence; infinite where it is not known."""
    loss = divergence_of(found)
    if loss is None:
        return math.inf
    return 0.0 if is_no_divergence(loss.value) else loss.value
