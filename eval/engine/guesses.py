"""What speculation did while something was measured: differences of the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.runtime.engine.engine import Engine


@dataclass(frozen=True)
class Guesses:
    steps: int = 0  # in which guesses were verified, counted for each sequence
    guessed: int = 0  # tokens
    accepted: int = 0  # of these

    @classmethod
    def so_far(cls, engine: Engine) -> Guesses:
        """Over the engine's life."""
        speculation = engine.speculation
        return cls(speculation.steps, speculation.guessed, speculation.accepted)

    def __add__(self, other: Guesses) -> Guesses:
        return Guesses(self.steps + other.steps, self.guessed + other.guessed, self.accepted + other.accepted)

    def __sub__(self, before: Guesses) -> Guesses:
        return Guesses(self.steps - before.steps, self.guessed - before.guessed, self.accepted - before.accepted)

    @property
    def tokens_per_step(self) -> float | None:
        """Of a step with guesses: the right ones and the token behind them. None where there was no such step."""
        return (self.steps + self.accepted) / self.steps if self.steps else None

    @property
    def acceptance(self) -> float | None:
        """Right guesses over all. Those behind a wrong one count as wrong."""
        return self.accepted / self.guessed if self.guessed else None

    @property
    def per_step(self) -> float | None:
        """Guesses of a step that has any."""
        return self.guessed / self.steps if self.steps else None
