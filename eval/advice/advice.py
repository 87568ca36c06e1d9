"""One recommendation: what to take for a goal, why, with which commands, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Goal = Literal["latency", "throughput", "memory", "quality"]
GOALS: tuple[Goal, ...] = get_args(Goal)


@dataclass(frozen=True)
class Reason:
    """Of one choice. `source` names the row or the formula that it rests on."""

    topic: str  # format, cache, parallelism, speculation or batch
    choice: str
    because: str
    source: str


@dataclass(frozen=True)
class Change:
    """What comes next, and where it would win."""

    runner_up: str | None
    words: str
    at: int | None = None  # concurrent requests from which the runner-up is the choice; None: at none


@dataclass(frozen=True)
class Advice:
    """Formats are recipes, `bf16`, or `as it is`."""

    model: str
    goal: Goal
    format: str
    reasons: tuple[Reason, ...]
    commands: tuple[str, ...]
    change: Change
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """As text."""
        yield f"For {self.goal}, {self.model}: {self.format}."
        for reason in self.reasons:
            yield f"  {reason.topic}: {reason.choice}, because {reason.because} [{reason.source}]"
        yield f"What would change it: {self.change.words}"
        yield from (f"note: {note}" for note in self.notes)
        yield from (f"$ {command}" for command in self.commands)
