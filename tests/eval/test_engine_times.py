"""What `bench engine` says of a load, from times alone."""

from __future__ import annotations

from quantkit.eval.engine.guesses import Guesses
from quantkit.eval.engine.run import EngineTimes, Load


def _times(step_ms: float, limit_ms: float | None) -> EngineTimes:
    return EngineTimes(Load(8, 16, 4), 2.0, (1.0, 1.0), (1.0, 1.0, 1.0), step_ms, limit_ms, Guesses())


def test_a_cache_too_small_for_everybody_at_once_has_no_share_of_the_limit() -> None:
    assert _times(0.0, 1.0).percent_of_limit is None
    assert _times(2.0, None).percent_of_limit is None
    assert _times(2.0, 1.0).percent_of_limit == 50.0
    assert _times(2.0, 1.0).tokens_per_second == 16.0
