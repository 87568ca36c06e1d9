"""Which format for which need, by rules that the report prints.

A format is acceptable when its perplexity is at most `ACCEPTABLE_RATIO` times the unquantized model's and its KL
divergence at most `ACCEPTABLE_KL`, both with the upper end of their 95 % interval: a good mean of few windows is no
promise, and perplexity alone forgives changes that happen to help. Best quality: the least KL divergence of the
acceptable quantized formats that save at least `WORTHWHILE_SAVING` of the bytes. Smallest: the fewest bytes of the
acceptable quantized formats. Fastest: the most tokens per second for the fewest requests at once that were measured, of
all acceptable formats, the unquantized one too; on a CPU only where a quantized one is clearly faster, since nobody
quantizes for the speed of a CPU that gains none. Two formats differ in quality where the paired difference of
their KL divergence over the same windows is clear (`same_quality`). A format that failed is never recommended. Where
quality was not measured, everything counts as acceptable (`sentences.py` says so).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quantkit.eval.compare.results import Comparison, FormatResult, Speed
from quantkit.eval.quality.bootstrap import Interval
from quantkit.eval.quality.paired import kl_difference

ACCEPTABLE_RATIO = 1.05
ACCEPTABLE_KL = 0.05  # nats per token: about the logarithm of that ratio, so that neither limit makes the other idle
WORTHWHILE_SAVING = 0.25
SAME_SPEED = 0.05  # speeds are measured once, so they have no interval: what is closer than this is a tie
BEST, SMALLEST, FASTEST = NEEDS = ("best quality", "smallest", "fastest")


@dataclass(frozen=True)
class Pick:
    """The format for a need; None where none meets the rule."""

    need: str
    format: str | None
    ties: tuple[str, ...] = ()  # formats that cannot be told apart from it in this respect


@dataclass(frozen=True)
class Choice:
    """What the rules say of a comparison; formats by name."""

    picks: tuple[Pick, ...]  # one for each of NEEDS
    acceptable: tuple[str, ...]
    unacceptable: tuple[str, ...]
    unjudged: tuple[str, ...]  # without quality where others have it: never recommended
    borderline: tuple[str, ...]  # unacceptable only because an interval reaches across a limit
    failed: tuple[str, ...]
    unpaired: tuple[str, ...]  # ties of these are guessed from overlapping intervals: they have no numbers by window
    quality_measured: bool
    batch: int | None  # requests at once that the fastest is about

    def pick(self, need: str) -> Pick:
        return next(pick for pick in self.picks if pick.need == need)


def choose(comparison: Comparison) -> Choice:
    whole = [found for found in comparison.formats if found.error is None]
    measured = any(ratio_of(found) is not None for found in whole if not found.baseline)
    acceptable = [found for found in whole if not measured or is_acceptable(found)]
    batch = first_batch(acceptable)
    picks = (
        _best(comparison, acceptable),
        _smallest([found for found in acceptable if not found.baseline]),
        _fastest(comparison, acceptable, batch),
    )
    return Choice(
        picks=picks,
        acceptable=_names(acceptable),
        unacceptable=_names(found for found in whole if found not in acceptable and ratio_of(found) is not None),
        unjudged=_names(found for found in whole if found not in acceptable and ratio_of(found) is None),
        borderline=_names(found for found in whole if _is_borderline(found)),
        failed=_names(found for found in comparison.formats if found.error is not None),
        unpaired=_names(found for found in whole if not found.baseline and _lacks_windows(found)),
        quality_measured=measured,
        batch=batch,
    )


def rules() -> tuple[str, ...]:
    """The rules as the report prints them."""
    limit, saving, tie = (f"{100 * share:.0f} %" for share in (ACCEPTABLE_RATIO - 1, WORTHWHILE_SAVING, SAME_SPEED))
    return (
        f"Acceptable: perplexity at most {limit} above the unquantized model's, and KL divergence at most "
        f"{ACCEPTABLE_KL:g} nats per token. The upper ends of both 95 % intervals must keep the limits; one window has "
        "no interval, and its values count.",
        f"Best quality: the least KL divergence among acceptable quantized formats that save at least {saving} of the "
        "bytes.",
        "Smallest: the fewest bytes among acceptable quantized formats.",
        "Fastest: the most tokens per second at the smallest batch that was measured, among acceptable formats and the "
        "unquantized model; on a CPU only where a quantized format is faster than the unquantized model.",
        "A tie in quality: the paired difference of KL divergence, window by window over the same windows, has an "
        "interval that holds 0. Results that were stored without numbers by window tie where their intervals overlap.",
        f"A tie in speed: less than {tie} apart, since each load was timed once.",
        "A format that failed is never recommended.",
    )


def is_acceptable(found: FormatResult) -> bool:
    ratio, kl = ratio_of(found), divergence_of(found)
    if found.baseline or ratio is None or kl is None:
        return found.baseline
    return ratio.upper <= ACCEPTABLE_RATIO and kl.upper <= ACCEPTABLE_KL


def ratio_of(found: FormatResult) -> Interval | None:
    return None if found.quality is None else found.quality.perplexity_ratio


def divergence_of(found: FormatResult) -> Interval | None:
    return None if found.quality is None else found.quality.kl


def same_quality(one: FormatResult, other: FormatResult) -> bool:
    """Whether the KL divergence of two formats cannot be told apart."""
    if one.quality is None or other.quality is None:
        return False
    difference = kl_difference(one.quality, other.quality)
    if difference is not None:
        return difference.holds(0.0)
    ours, theirs = one.quality.kl, other.quality.kl
    return ours is not None and theirs is not None and ours.overlaps(theirs)


def speed_at(found: FormatResult, batch: int | None) -> Speed | None:
    speeds = found.running.speeds if found.running else ()
    return next((speed for speed in speeds if speed.batch == batch), None)


def first_batch(formats: Sequence[FormatResult]) -> int | None:
    """The fewest requests at once that were measured."""
    return min((speed.batch for found in formats if found.running for speed in found.running.speeds), default=None)


def _smallest(formats: Sequence[FormatResult]) -> Pick:
    sized = [found for found in formats if found.size is not None]
    return _pick(SMALLEST, sized, lambda found: found.size.bytes if found.size else 0, lambda one, other: False)


def _fastest(comparison: Comparison, formats: Sequence[FormatResult], batch: int | None) -> Pick:
    def rate(found: FormatResult) -> float:
        speed = speed_at(found, batch)
        return speed.tokens_per_second if speed else 0.0

    timed = [found for found in formats if rate(found) > 0]
    pick = _pick(
        FASTEST, timed, lambda found: -rate(found), lambda one, other: rate(other) > (1 - SAME_SPEED) * rate(one)
    )
    base = comparison.baseline.name if comparison.baseline else None
    gains = comparison.machine.gpu or base not in (pick.format, *pick.ties)
    return pick if gains else Pick(FASTEST, None)


def _best(comparison: Comparison, formats: Sequence[FormatResult]) -> Pick:
    base = comparison.baseline.size if comparison.baseline else None
    most = (1 - WORTHWHILE_SAVING) * base.bytes if base else 0
    saving = [found for found in formats if not found.baseline and found.size and found.size.bytes <= most]
    known = {found.name: kl for found in saving if (kl := divergence_of(found)) is not None}
    candidates = [found for found in saving if found.name in known]
    return _pick(BEST, candidates, lambda found: known[found.name].value, same_quality)


def _pick(
    need: str,
    formats: Sequence[FormatResult],
    cost: Callable[[FormatResult], float],
    same: Callable[[FormatResult, FormatResult], bool],
) -> Pick:
    """The format of the least cost; the first of equals, so that the order of recipes decides."""
    if not formats:
        return Pick(need, None)
    best = min(formats, key=cost)
    ties = (found for found in formats if found is not best and (cost(found) == cost(best) or same(best, found)))
    return Pick(need, best.name, _names(ties))


def _lacks_windows(found: FormatResult) -> bool:
    """Whether its quality is known, but cannot be paired with another's window by window."""
    return found.quality is not None and found.quality.kl is not None and found.quality.window_kl is None


def _is_borderline(found: FormatResult) -> bool:
    ratio, kl = ratio_of(found), divergence_of(found)
    if is_acceptable(found) or ratio is None or kl is None:
        return False
    return ratio.value <= ACCEPTABLE_RATIO and kl.value <= ACCEPTABLE_KL


def _names(formats: Iterable[FormatResult]) -> tuple[str, ...]:
    return tuple(found.name for found in formats)
