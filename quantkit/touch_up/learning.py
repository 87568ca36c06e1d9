"""The steps of a touch-up: each on a few sequences, the best kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.divergence import token_divergence
from quantkit.methods.held_back import judged, learning_order
from quantkit.touch_up.student import Student

JUDGEMENTS = 5  # of a run, evenly spaced
BATCH = 8  # sequences of a step
RATE = 4e-3  # of Adam's first step, in shares of a scale; it falls to 0 in a straight line


@dataclass(frozen=True)
class Touched:
    """Mean KL divergence per token on the judged sequences, at the start and after the best step; 0: the start."""

    start_kl: float
    kl: float
    step: int


class TouchUp:
    """Lets a student learn what its teacher predicts for tokens [sequences, length]."""

    def __init__(self, teacher: nn.Module, student: Student, tokens: Tensor, *, rate: float = RATE) -> None:
        self._teacher, self._student, self._tokens, self._rate = teacher, student, tokens, rate

    def learn(self, steps: int, *, seed: int = 0, on_step: Callable[[int, float | None], None]) -> Touched:
        """Leaves the student as it was after the best step. `on_step` gets the number of each, and its KL if judged."""
        least = start = self._judged_kl()
        best, found = self._values(), 0
        every = max(1, steps // JUDGEMENTS)
        for step in self._steps(steps, seed):
            kl = self._judged_kl() if step % every == 0 or step == steps else None
            if kl is not None and kl < least:
                best, least, found = self._values(), kl, step
            on_step(step, kl)
        with torch.no_grad():
            for parameter, value in zip(self._student.parameters, best, strict=True):
                parameter.copy_(value)
        return Touched(start, least, found)

    def _steps(self, steps: int, seed: int) -> Iterator[int]:
        """Takes one step after the other; yields the number of those taken."""
        adam = torch.optim.Adam(self._student.parameters, betas=(0.9, 0.95))
        order = learning_order(len(self._tokens), seed)
        count = min(BATCH, len(self._tokens))
        for step in range(steps):
            adam.zero_grad()
            for _ in range(count):
                loss = self._kl(self._tokens[next(order)]) / count
                loss.backward()
            for group in adam.param_groups:
                group["lr"] = self._rate * (1 - step / steps)
            adam.step()
            self._student.limit()
            yield step + 1

    @torch.no_grad()
    def _judged_kl(self) -> float:
        numbers = judged(len(self._tokens))
        return sum(float(self._kl(self._tokens[number])) for number in numbers) / len(numbers)

    def _kl(self, tokens: Tensor) -> Tensor:
        """Mean divergence of the predictions of one sequence's tokens."""
        with torch.no_grad():
            wanted: Tensor = self._teacher(tokens.unsqueeze(0), use_cache=False).logits[0]
        return token_divergence(wanted, self._student.logits(tokens)).mean()

    def _values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._student.parameters]
