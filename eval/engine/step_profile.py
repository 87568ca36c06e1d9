"""Where the time of a decode step goes, from a timeline of the device: arithmetic alone.

Every moment is counted once. Launches may overlap (`kernels/chain.py`): one that begins early waits for the one before,
so the moment belongs to the one that began first. What no launch covers is a gap, and belongs to the launch behind it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantkit.errors import QuantkitError

END_OF_STEP = "Memcpy DtoH"  # sampled tokens go to the host: once a step, and behind everything else in it
_TRIMMED = 5  # one in so many steps, of the fastest and of the slowest ones, does not count
_LONGEST_NAME = 72
_NOISE = re.compile(r"^void |\bat::(native|cuda)::|\(anonymous namespace\)::|<unnamed>::")


class Event(NamedTuple):
    """A kernel or copy on the device, in microseconds of any clock."""

    start: float
    duration: float
    name: str


class Piece(NamedTuple):
    """What one launch adds to the time: nothing runs for `gap`, then nothing but it and later ones for `us`."""

    name: str
    us: float
    gap: float


@dataclass(frozen=True)
class KernelShare:
    """All launches of one kernel in one step."""

    name: str
    launches: int
    us: float
    gap_us: float  # idle time in front of them, but for what is between steps


@dataclass(frozen=True)
class StepTable:
    """The mean of some steps with the same kernels."""

    kernels: tuple[KernelShare, ...]  # the longest first
    between_us: float  # from the end of a step to the first launch of the next: the host was not ready
    steps: int  # that count
    alike: int  # with these kernels; the fastest and the slowest do not count
    seen: int  # whole ones in the timeline

    @property
    def gaps_us(self) -> float:
        return sum(kernel.gap_us for kernel in self.kernels)

    @property
    def us(self) -> float:
        return sum(kernel.us for kernel in self.kernels) + self.gaps_us + self.between_us

    @property
    def launches(self) -> int:
        return sum(kernel.launches for kernel in self.kernels)

    def percent(self, us: float) -> float:
        return 100 * us / self.us if self.us else 0.0


def tidy_name(name: str) -> str:
    """Without what all names of torch's kernels have, and without the end of long ones."""
    short = _NOISE.sub("", name)
    return short if len(short) <= _LONGEST_NAME else short[: _LONGEST_NAME - 3] + "..."


def whole_steps(events: Iterable[Event], end: str = END_OF_STEP) -> list[list[Piece]]:
    """The steps of a timeline, each up to an event whose name begins with `end`.

    What comes before the first end is dropped, as it may have begun earlier, and so is what comes behind the last.
    """
    steps: list[list[Piece]] = []
    step: list[Piece] = []
    covered: float | None = None
    for event in sorted(events):
        before = event.start if covered is None else covered
        after = max(before, event.start + event.duration)
        gap = max(0.0, event.start - before)
        step.append(Piece(tidy_name(event.name), after - before - gap, gap))
        covered = after
        if event.name.startswith(end):
            steps.append(step)
            step = []
    return steps[1:]


def step_table(steps: Sequence[Sequence[Piece]]) -> StepTable:
    """Of the steps with the most usual kernels: now and then one has more, as when contexts need new pages."""
    if not steps:
        raise QuantkitError("the profiler saw no whole step on the GPU; use more --steps, and let no one else profile")
    kinds = [frozenset(Counter(piece.name for piece in step).items()) for step in steps]
    usual = Counter(kinds).most_common(1)[0][0]
    alike = sorted((step for step, kind in zip(steps, kinds, strict=True) if kind == usual), key=_duration)
    trimmed = len(alike) // _TRIMMED
    kept = alike[trimmed : len(alike) - trimmed]
    us: dict[str, float] = defaultdict(float)
    gaps: dict[str, float] = defaultdict(float)
    for step in kept:
        for place, piece in enumerate(step):
            us[piece.name] += piece.us / len(kept)
            gaps[piece.name] += piece.gap / len(kept) if place else 0.0
    shares = [KernelShare(name, launches, us[name], gaps[name]) for name, launches in usual]
    return StepTable(
        kernels=tuple(sorted(shares, key=lambda share: (-share.us, share.name))),
        between_us=sum(step[0].gap for step in kept) / len(kept),
        steps=len(kept),
        alike=len(alike),
        seen=len(steps),
    )


def _duration(step: Sequence[Piece]) -> float:
    return sum(piece.us + piece.gap for piece in step)
