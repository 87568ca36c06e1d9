"""Numbers as the report writes them: one spelling for each measure, in the page, in Markdown and in the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable

from quantkit.eval.quality.bootstrap import Interval

NOTHING = "–"  # noqa: RUF001  (what stands where nothing was measured)
_NO_DIVERGENCE = 1e-6  # nats: below this two models are the same but for the order of additions


def significant(value: float, digits: int = 3) -> str:
    """0.000423, 0.0131, 1.24, 15,432: never an exponent, and no digit before the point is rounded away."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def divergence(nats: float, digits: int = 3) -> str:
    return "0" if is_no_divergence(nats) else significant(nats, digits)


def is_no_divergence(nats: float) -> bool:
    """An unquantized model against itself."""
    return nats < _NO_DIVERGENCE


def perplexity(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def exact_perplexity(value: float) -> str:
    return f"{value:,.4f}"


def change(ratio: float) -> str:
    """1.0213 -> `+2.13 %`."""
    percent = 100 * (ratio - 1)
    digits = 2 if abs(percent) < 100 else 0
    return f"{percent + 0.0:+,.{digits}f} %".replace("-", "−")  # noqa: RUF001  (a minus as wide as the plus)


def rough_change(ratio: float) -> str:
    """For the bounds of an interval in a narrow table."""
    percent = 100 * (ratio - 1)
    return f"{percent + 0.0:+,.{2 if abs(percent) < 10 else 1 if abs(percent) < 100 else 0}f} %".replace("-", "−")  # noqa: RUF001


def share(value: float, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f} %"


def rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:,.1f}"


def milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def seconds(value: float) -> str:
    """8.1 s; 4 min 12 s; 2 h 5 min."""
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def times(ratio: float) -> str:
    """1.79 -> `1.79×`."""
    return f"{ratio:.2f}×"  # noqa: RUF001


def bounds(interval: Interval, spell: Callable[[float], str]) -> str:
    """`[low, high]` without the unit, or nothing where there is no interval or no doubt."""
    if interval.low is None or interval.high is None or interval.low == interval.high:
        return ""
    low, high = (spell(bound).removesuffix(" %") for bound in (interval.low, interval.high))
    return f"[{low}, {high}]"
