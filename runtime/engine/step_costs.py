"""What a step costs, as far as it was measured: seconds for so many sequences with so many guesses each.

Most combinations were never run. A step with guesses is a plain step, what more tokens cost the device, and the draft:
between the sizes that are known, seconds grow in straight lines. What a plain step takes and what its graph takes are
never points of one line: a small model's step waits for the host, and a line from one to the other would be steep.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping
from math import log2
from statistics import median

from quantkit.runtime.device.decode_graphs import graph_sizes

_KEPT = 5  # measurements of a combination; their median counts, so a step that compiled a kernel does no harm
_FEW = 3  # below that the smallest counts
_DOUBT = 2.0  # times what was expected: more is not believed of a few steps
_FRESH = 16  # times that an estimate is given again before it is made anew
_SIZES = graph_sizes(1024)
_READ = 96  # tokens that a draft reads while it makes a guess: both read all of its weights
_GUESS = 0.1  # of a plain step, where nobody knows what the draft costs


class Costs:
    def __init__(
        self,
        graph_seconds: Mapping[tuple[int, int], float] | None = None,
        draft_seconds: Mapping[tuple[int, int], float] | None = None,
        draft_share: float = _GUESS,
    ) -> None:
        """`graph_seconds` of (sequences, new tokens of each) and `draft_seconds` of (sequences, guesses) may grow as
        graphs are captured. `draft_share`: how large the draft is beside the model; 0 where guesses cost nothing."""
        self._graph_seconds = graph_seconds if graph_seconds is not None else {}
        self._draft_seconds = draft_seconds if draft_seconds is not None else {}
        self._draft_share = draft_share
        self._measured: dict[tuple[int, int], deque[float]] = {}
        self._seen: set[tuple[int, int]] = set()
        self._graphs = 0  # that were there at the last observation
        self._looked_up: dict[tuple[int, int], tuple[float | None, int]] = {}  # seconds, how often they still hold

    def observe(self, sequences: int, guesses: int, seconds: float) -> None:
        """A step took so long. The first of a kind is not believed, and none during which a graph was captured: one
        such number would say for ever that guesses do not pay."""
        key = _padded(sequences), guesses
        graphs = len(self._graph_seconds) + len(self._draft_seconds)
        captured, self._graphs = graphs != self._graphs, graphs
        if key in self._seen and not captured:
            if len(self._measured.get(key, ())) < _FEW:
                self._looked_up.clear()
            self._measured.setdefault(key, deque(maxlen=_KEPT)).append(seconds)
        self._seen.add(key)

    def estimate(self, sequences: int, guesses: int) -> float | None:
        """None while nothing is known at all. What was looked up lately is not looked up again at once."""
        key = _padded(sequences), guesses
        seconds, fresh = self._looked_up.get(key, (None, 0))
        if seconds is None or fresh == 0:
            seconds, fresh = self._estimate(*key), _FRESH
        self._looked_up[key] = seconds, fresh - 1
        return seconds

    @property
    def has_plain(self) -> bool:
        """Whether any plain step was measured: what its graph takes is not what it takes."""
        return any(guesses == 0 for _, guesses in self._measured)

    def has_guesses(self, sequences: int) -> bool:
        """Whether a step with guesses for so many was measured."""
        return any(size == _padded(sequences) and guesses > 0 for size, guesses in self._measured)

    def _estimate(self, size: int, guesses: int) -> float | None:
        found = self._measured.get((size, guesses), ())
        expected = self._expected(size, guesses)
        if not found or expected is None:
            return _typical(found) if found else expected
        return _typical(found) if len(found) >= _FEW else min(_typical(found), _DOUBT * expected)

    def _expected(self, size: int, guesses: int) -> float | None:
        """Of a combination that was never run."""
        if guesses == 0:
            known = sorted((self._device() | self._walls()).items())
            return _between(known, size) if known else None
        parts = self._by_parts(size, guesses)
        return None if parts is None else parts + self._beside(size, guesses)

    def _walls(self) -> dict[int, float]:
        """Seconds of plain steps, by their tokens."""
        return {size: _typical(found) for (size, guesses), found in self._measured.items() if guesses == 0}

    def _device(self) -> dict[int, float]:
        """Seconds of graphs, by their tokens."""
        return {size * new: seconds for (size, new), seconds in self._graph_seconds.items()}

    def _by_parts(self, size: int, guesses: int) -> float | None:
        """A step with guesses as the sum of what it is made of."""
        plain = self._estimate(size, 0)
        if plain is None:
            return None
        line = sorted((self._device() or self._walls()).items())
        more = _between(line, size * (1 + guesses)) - _between(line, size)
        return plain + max(0.0, more) + self._draft(size, guesses, plain)

    def _beside(self, size: int, guesses: int) -> float:
        """What the most similar step with guesses took beside its parts: host that nothing overlaps, sampling."""
        run = [key for key in self._measured if key[1] > 0 and key != (size, guesses)]
        if not run:
            return 0.0
        key = min(run, key=lambda known: (abs(log2(known[0] / size)), abs(known[1] - guesses)))
        parts = self._by_parts(*key)
        return 0.0 if parts is None else max(0.0, _typical(self._measured[key]) - parts)

    def reading(self, tokens: int) -> float:
        """Seconds for what a draft must read before it guesses, by those of a guess."""
        return self._draft(1, 1, self.estimate(1, 0) or 0.0) * (1 + tokens / _READ) if tokens else 0.0

    def _draft(self, sequences: int, guesses: int, plain: float) -> float:
        each = sorted({size: seconds / count for (size, count), seconds in sorted(self._draft_seconds.items())}.items())
        return guesses * (_between(each, sequences) if each else self._draft_share * plain)


def _typical(seconds: Collection[float]) -> float:
    return min(seconds) if len(seconds) < _FEW else median(seconds)


def _padded(sequences: int) -> int:
    return _SIZES[min(bisect_left(_SIZES, sequences), len(_SIZES) - 1)]


def _between(known: list[tuple[int, float]], at: int) -> float:
    """On the line through the points around `at`. Outside, smaller ones cost as much as the smallest, and larger ones
    follow the last line, or a proportion where there is a single point."""
    place = bisect_left(known, (at, 0.0))
    if place == 0:
        return known[0][1]
    if place == len(known):
        if len(known) == 1:
            return known[0][1] * max(1.0, at / max(known[0][0], 64))
        place -= 1
    (left, low), (right, high) = known[place - 1], known[place]
    return max(low, low + (high - low) * (at - left) / (right - left))
