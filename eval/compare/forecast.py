"""About how long a comparison will still take, judged by what its parts took so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quantkit.eval.compare.asked import Asked, Entry
from quantkit.eval.compare.parts import parts_of

START = "starting"
# Seconds of `quantkit demo` on two slow cores. The first parts are judged by these, all later ones by their ratios.
USUAL = {START: 3.0, "quantize": 20.0, "size": 0.1, "quality": 8.0, "reference": 8.0, "layers": 5.0, "speed": 4.0}
_TRUST = 10.0  # seconds after which what was seen counts as much as USUAL

Step = tuple[str, str]  # a format and a part of its measurement


def steps_of(asked: Asked, entries: Sequence[Entry]) -> list[Step]:
    """Everything that a comparison does, in order."""
    return [(entry.name, part) for entry in entries for part in (START, *(one.name for one in parts_of(asked, entry)))]


class Forecast:
    """Told of every step that begins and of every format that is done."""

    def __init__(self, steps: Sequence[Step], clock: Callable[[], float] = time.monotonic) -> None:
        self._ahead = list(steps)
        self._clock = clock
        self._current: Step | None = None
        self._since = clock()
        self._usual, self._taken = _TRUST, _TRUST  # of the steps that are done

    @property
    def seconds_left(self) -> float:
        pace = self._taken / self._usual
        now = 0.0 if self._current is None else USUAL[self._current[1]] * pace - (self._clock() - self._since)
        return max(now, 0.0) + pace * sum(USUAL[part] for _, part in self._ahead)

    def begin(self, step: Step) -> None:
        """Steps before it are done, or were not needed."""
        if step == self._current or step not in self._ahead:
            return
        self._end_current()
        self._ahead = self._ahead[self._ahead.index(step) + 1 :]
        self._current = step

    def finish(self, name: str) -> None:
        """A format is done, or failed, or was measured before."""
        self._end_current()
        self._ahead = [step for step in self._ahead if step[0] != name]

    def _end_current(self) -> None:
        if self._current is not None:
            self._usual += USUAL[self._current[1]]
            self._taken += self._clock() - self._since
        self._current, self._since = None, self._clock()


def spoken(seconds: float) -> str:
    """`40 s` or `3 min`: no more precise than it is."""
    if seconds < 55:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{round(seconds / 60)} min" if seconds >= 90 else "1 min"
