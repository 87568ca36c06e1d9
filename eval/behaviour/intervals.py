"""How sure a share of prompts is, how sure the difference between two models is, and what may be said about it.

Few prompts are measured, and often all of them succeed. Both intervals are made for that: they do not shrink to a point
where nothing failed, as a bootstrap would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from quantkit.eval.quality.bootstrap import CONFIDENCE, Interval

MARGIN = 0.05  # a loss of this share of prompts is small enough to be called "no worse"
WORSE, NO_WORSE = "worse", "no worse"
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def share_of(values: Sequence[float]) -> Interval:
    """The mean of a share for each prompt, with Wilson's interval.

    Prompts count, not answers: several answers to one prompt are not independent.
    """
    count, share = len(values), math.fsum(values) / len(values)
    middle = share + _Z**2 / (2 * count)
    reach = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    low, high = ((middle + side * reach) / (1 + _Z**2 / count) for side in (-1, 1))
    return Interval(share, max(0.0, min(share, low)), min(1.0, max(share, high)))


def paired_difference(differences: Sequence[float]) -> Interval:
    """The mean of the differences between two models, prompt by prompt, with the interval of Bonett and Price.

    That is the usual normal interval after two prompts are added, one that gained and one that lost: the confidence
    interval of McNemar's test, made for few prompts. Differences between -1 and 1 are for several answers a prompt.
    """
    count = len(differences) + 2
    total, squares = math.fsum(differences), math.fsum(one * one for one in differences) + 2
    middle = total / count
    reach = _Z * math.sqrt((squares / count - middle**2) / count)
    return Interval(total / len(differences), max(-1.0, middle - reach), min(1.0, middle + reach))


def verdict(gains: Sequence[float]) -> str:
    """Of the differences prompt by prompt, where more is better.

    Worse: the whole interval is below zero. No worse: no prompt lost, or the interval excludes a loss above MARGIN.
    """
    found = paired_difference(gains)
    assert found.low is not None
    assert found.high is not None
    if found.high < 0:
        return WORSE
    if min(gains) >= 0 or found.low >= -MARGIN:
        return NO_WORSE
    return f"cannot tell with {len(gains)} prompt{'s' if len(gains) > 1 else ''}"
