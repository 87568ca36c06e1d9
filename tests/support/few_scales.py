"""Searches for input scales that try a few candidates: they take most of a small run with awq, best or tuned."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor

from quantkit.methods import awq

POINTS = 3


@contextmanager
def few_scales() -> Iterator[None]:
    """Within it awq's search, and that of methods which begin with it, tries at most 2 * (POINTS + 1) candidates: for
    tests of what is done with scales. How good the best are is asked elsewhere."""
    all_of_them = awq.candidates

    def fewer(weight: Tensor, hessian: Tensor, points: int, group: int) -> Iterator[Tensor]:
        return all_of_them(weight, hessian, min(points, POINTS), group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(awq, "candidates", fewer)
        yield
